"""The contract of capture, written once and run on every graph device."""
