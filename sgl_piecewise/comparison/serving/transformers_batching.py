"""transformers' own continuous batching (``generate_batch``) on a shape of ours, for the same load.

Its model has random weights of its own, and plain RoPE: times do not depend on the values. What its
interface or its device support refuses becomes a message in the report, and other figures stand.

Source: transformers 5.17 to 5.24, ``generation/continuous_batching``.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from sgl_piecewise.models.config import DecoderConfig
from sgl_piecewise.models.extras import import_extra
from sgl_piecewise.runtime.errors import ConfigError

_CLASSES = {"qwen3": ("Qwen3Config", "Qwen3ForCausalLM"), "llama": ("LlamaConfig", "LlamaForCausalLM")}
_REFUSALS = (TypeError, ValueError, AttributeError, RuntimeError, ImportError, NotImplementedError)
ATTENTION = "sdpa"


def reference_of(config: DecoderConfig, *, device: torch.device, dtype: torch.dtype) -> Any:
    """Returns transformers' model of a shape, with random weights.

    Raises:
        ConfigError: The architecture is not among those that are known here.
        MissingExtraError: transformers is not installed.
    """
    transformers = import_extra("transformers", purpose="measure its continuous batching")
    if config.architecture not in _CLASSES:
        raise ConfigError(
            f"transformers' continuous batching is measured on shapes of {', '.join(sorted(_CLASSES))}, and this one "
            f"is {config.architecture!r}."
        )
    config_class, model_class = (getattr(transformers, name) for name in _CLASSES[config.architecture])
    settings = config_class(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=config.has_tied_embeddings,
        attn_implementation=ATTENTION,
        dtype=dtype,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return model_class(settings).eval()
    finally:
        torch.set_default_dtype(before)


def measure_generate_batch(
    model: Any, prompts: Sequence[Sequence[int]], *, num_new_tokens: int
) -> dict[str, Any]:
    """Generates for prompts at once and reads the pace of decoding from the tokens' times.

    Args:
        model: From `reference_of`.
        prompts: Token ids.
        num_new_tokens: Of each.

    Returns:
        ``step_s``, the median time between two tokens of a request, and ``tokens_per_s`` of all; or ``error``.
    """
    transformers = import_extra("transformers", purpose="measure its continuous batching")
    settings = transformers.GenerationConfig(
        max_new_tokens=num_new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    try:
        outputs = model.generate_batch(
            [list(prompt) for prompt in prompts], generation_config=settings, record_timestamps=True
        )
    except _REFUSALS as error:
        return {"error": f"generate_batch of transformers {transformers.__version__}: {error}"}
    if len(outputs) != len(prompts):
        return {
            "error": f"generate_batch of transformers {transformers.__version__} on {model.device} answered "
            f"{len(outputs)} of {len(prompts)} requests; its log says why."
        }
    steps: list[float] = []
    for name, output in outputs.items():
        times = output.timestamps or []
        if output.error is not None or len(times) != num_new_tokens:
            return {"error": f"{name}: {len(times)} of {num_new_tokens} tokens ({output.error})."}
        steps += [later - earlier for earlier, later in itertools.pairwise(times)]
    step_s = statistics.median(steps)
    return {
        "step_s": step_s,
        "tokens_per_s": len(prompts) / step_s,
        "attention": ATTENTION,
        "transformers": transformers.__version__,
    }
