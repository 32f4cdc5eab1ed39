"""The emulated graph device: capture on a CPU under CUDA's rules."""
