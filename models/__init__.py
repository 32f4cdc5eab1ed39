"""Model definitions and their weights, written as plain PyTorch.

No module here asks whether it is being captured or compiled, or on which device it runs: that is the
test of the whole design. Attention is reached through a marked call of ``runtime.attention``.
"""
