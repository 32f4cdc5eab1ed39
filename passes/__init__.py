"""FX graph passes of the compile axis, planned: one a file, listed in one pipeline.

Nothing is here yet; `docs/architecture.md` says where they will stand. A pass may import ``runtime`` and
must not know the compiler that runs it.
"""
