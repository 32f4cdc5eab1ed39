"""FX graph passes of the compile axis: one a file, listed in one pipeline.

Each is ``(gm, example_inputs, *, ...) -> gm``. A pass may import ``runtime`` and must not know the compiler
that runs it.
"""
