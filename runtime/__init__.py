"""The runtime: the mark, capture, and the execution layer over it. It never imports ``compiler`` or ``models``."""
