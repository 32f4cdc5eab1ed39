"""SmolLM2-135M-Instruct as transformers has it, and a text for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from models_gguf import gguf_name, interleaved_order, read_tensors

TEXT = """\
A CUDA graph records a sequence of kernels once and launches them again with one call. On a model
that runs many small kernels this removes most of the time that the host spends on launching them.
What cannot be recorded has to run between two graphs: here that is attention, whose work depends
on how long each sequence is. In 2024, a batch of 16 tokens took about 9 milliseconds that way.

    def replay(self):
        for segment in self.segments:
            segment.run()

"Is the result the same?" she asked. It is, bit for bit, as long as nothing is read before it has
been written, and nothing that is still needed is given back too early.
"""


def reference_smollm2(path: Path) -> Any:
    """transformers' class, filled from the file by the package and the converter's order of rows."""
    import transformers

    # As published in HuggingFaceTB/SmolLM2-135M-Instruct, config.json.
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    stored = read_tensors(path)
    for name, parameter in model.named_parameters():
        values = torch.from_numpy(np.array(stored[gguf_name(name)]))
        heads = {"q_proj": 9, "k_proj": 3}.get(name.split(".")[-2])
        with torch.no_grad():
            if heads is None:
                parameter.copy_(values)
            else:
                parameter[torch.from_numpy(interleaved_order(values.shape[0], heads))] = values
    return model
