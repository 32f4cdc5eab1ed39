"""The compile axis: a Dynamo backend that maps a forward to a compiled forward.

It may import ``passes`` and ``runtime``, and must not know which capture strategy its result is used with.
"""
