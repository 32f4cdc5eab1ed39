"""The runtime: mark, capture, context, attention. It never imports ``compiler`` or ``models``."""
