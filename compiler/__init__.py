"""The compile axis, planned: a Dynamo backend that maps a forward to a compiled forward.

Nothing is here yet; `docs/architecture.md` says where it will stand. It may import ``passes`` and
``runtime``, and must not know which capture strategy its result is used with.
"""
