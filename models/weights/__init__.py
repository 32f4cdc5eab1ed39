"""Where a decoder's weights come from: a Hugging Face folder, a GGUF file, or a seed.

Every source ends in the same place, ``placement.fill_parameters``, or fills all parameters by
itself; a model never leaves here half filled.
"""
