"""Weights and tokenizers from Hugging Face folders: round trips, and what is wrong with bad ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models_reference import (
    TINY_EXPERTS,
    TINY_GEMMA,
    TINY_SETTINGS,
    logits_of,
    reference_logits,
    reference_model,
    saved,
)
from safetensors.torch import load_file, save_file

from sgl_piecewise.models.loading import load_model
from sgl_piecewise.models.weights.huggingface import load_huggingface
from sgl_piecewise.models.weights.placement import checkpoint_views
from sgl_piecewise.models.weights.random import random_decoder
from sgl_piecewise.runtime.errors import CheckpointError, ConfigError

TOKEN_IDS = [5, 17, 3, 80, 41, 9]


@pytest.fixture(scope="module")
def reference() -> Any:
    return reference_model("qwen2")


@pytest.fixture
def folder(reference: Any, tmp_path: Path) -> Path:
    return saved(reference, tmp_path / "tiny-qwen2")


def load(folder: Path) -> Any:
    return load_huggingface(folder, device="cpu", dtype=torch.float32)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_every_tensor_of_a_folder_arrives_bit_for_bit(reference: Any, folder: Path) -> None:
    views = checkpoint_views(load(folder))
    expected = reference.state_dict()
    assert views.keys() == expected.keys()
    assert all(torch.equal(views[name], expected[name]) for name in expected)


def test_a_sharded_folder_loads_like_a_single_file(reference: Any, folder: Path, tmp_path: Path) -> None:
    sharded = saved(reference, tmp_path / "sharded", max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert torch.equal(logits_of(load(sharded), TOKEN_IDS), logits_of(load(folder), TOKEN_IDS))


def test_a_bfloat16_checkpoint_loads_into_float32_and_back(reference: Any, tmp_path: Path) -> None:
    half = saved(reference_model("qwen2").to(torch.bfloat16), tmp_path)
    model = load(half)
    assert model.norm.weight.dtype == torch.float32
    narrow = load_huggingface(half, device="cpu", dtype=torch.bfloat16)
    assert torch.equal(narrow.norm.weight, model.norm.weight.to(torch.bfloat16))


def test_a_tied_checkpoint_may_hold_the_output_layer_a_second_time(tmp_path: Path) -> None:
    tied = reference_model("llama", tie_word_embeddings=True)
    folder = saved(tied, tmp_path)
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert (logits_of(load(folder), TOKEN_IDS) - reference_logits(tied, TOKEN_IDS)).abs().max() < 1e-4


def test_frequencies_in_an_old_checkpoint_are_ignored(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    before = logits_of(load(folder), TOKEN_IDS)
    edit_tensors(folder, lambda t: t.update({name: torch.ones(8)}))
    assert torch.equal(logits_of(load(folder), TOKEN_IDS), before)


def test_missing_extra_and_misshapen_tensors_are_all_listed_with_both_shapes(folder: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.self_attn.k_proj.bias"]
        tensors["model.layers.0.self_attn.sinks"] = torch.zeros(4)
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(95, 64)

    edit_tensors(folder, edit)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    message = str(caught.value)
    assert "missing (1): model.layers.1.self_attn.k_proj.bias (32,)" in message
    assert "without a place in the model (1): model.layers.0.self_attn.sinks (4,)" in message
    assert "of another shape (1): model.layers.0.mlp.up_proj.weight: (95, 64) in the checkpoint" in message
    assert "(96, 64) in the model" in message


def test_a_long_list_of_problems_is_cut_and_counted(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=4)
    with pytest.raises(CheckpointError, match=r"missing \(24\): .*, and 16 more"):
        load(folder)


def test_a_merged_projection_is_filled_whole_or_the_load_raises(folder: Path) -> None:
    """Leaving out one of the three parts of qkv_proj would leave rows uninitialised."""
    edit_tensors(folder, lambda t: t.pop("model.layers.0.self_attn.v_proj.weight"))
    with pytest.raises(CheckpointError, match=r"missing \(1\): model\.layers\.0\.self_attn\.v_proj\.weight"):
        load(folder)


def test_views_cover_every_parameter_exactly_once() -> None:
    from sgl_piecewise.models.shapes import SHAPES

    model = random_decoder(SHAPES["tiny"], device="cpu", dtype=torch.float32)
    for view in checkpoint_views(model).values():
        view.add_(1.0)
    again = random_decoder(SHAPES["tiny"], device="cpu", dtype=torch.float32)
    for changed, original in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(changed, original + 1.0)


def test_a_folder_without_config_says_so(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load(folder)


@pytest.mark.parametrize(("text", "message"), [("{", "not valid JSON"), ("[1]", "holds a list")])
def test_a_damaged_config_says_so(folder: Path, text: str, message: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("hidden_size", "32"),
        ("rms_norm_eps", "1e-6"),
        ("num_attention_heads", [4]),
        ("max_position_embeddings", True),
        ("rope_scaling", {"rope_type": "linear", "factor": "2"}),
    ],
)
def test_a_setting_that_is_no_number_is_named(folder: Path, setting: str, value: Any) -> None:
    edit_config(folder, **{setting: value})
    named = "factor" if isinstance(value, dict) else setting
    with pytest.raises(CheckpointError, match=f"setting '{named}' must be a number, got"):
        load(folder)


def test_integer_weights_are_refused(folder: Path) -> None:
    """They are quantised, and were taken for values."""
    name = "model.layers.0.mlp.up_proj.weight"
    edit_tensors(folder, lambda t: t.update({name: t[name].to(torch.int8)}))
    with pytest.raises(CheckpointError, match=rf"{name} holds torch.int8.*GGUF"):
        load(folder)


def test_an_index_that_names_no_file_says_so(reference: Any, tmp_path: Path) -> None:
    sharded = saved(reference, tmp_path, max_shard_size="100KB")
    (sharded / "model.safetensors.index.json").write_text('{"weight_map": {"model.norm.weight": 3}}')
    with pytest.raises(CheckpointError, match=r"weight_map\['model\.norm\.weight'\] must name a file, got 3"):
        load(sharded)


def test_an_empty_name_is_not_the_current_folder() -> None:
    with pytest.raises(ConfigError, match="'' is neither a file or folder here nor a model's name"):
        load_model("", device="cpu", dtype=torch.float32)


def test_a_folder_without_safetensors_says_what_is_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="Weights are read from safetensors only"):
        load(folder)


@pytest.mark.parametrize("num_bytes", [0, 4, 100, 5000])
def test_a_truncated_weights_file_is_named(folder: Path, num_bytes: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged or not a safetensors file"):
        load(folder)


def test_a_missing_shard_is_named(reference: Any, tmp_path: Path) -> None:
    sharded = saved(reference, tmp_path, max_shard_size="100KB")
    gone = sorted(sharded.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=f"lacks 1 of .* shards.*{gone.name}"):
        load(sharded)


def test_an_index_without_a_map_says_so(reference: Any, tmp_path: Path) -> None:
    sharded = saved(reference, tmp_path, max_shard_size="100KB")
    (sharded / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has no weight_map"):
        load(sharded)


def test_an_unknown_architecture_lists_the_known(folder: Path) -> None:
    edit_config(folder, model_type="mixtral")
    with pytest.raises(CheckpointError, match=r"'mixtral' is not supported.*llama, qwen2, qwen3"):
        load(folder)


def test_load_model_takes_a_folder_with_or_without_a_tokenizer(folder: Path) -> None:
    loaded = load_model(folder, device="cpu", dtype=torch.float32)
    assert loaded.tokenizer is None
    assert loaded.config.vocab_size == TINY_SETTINGS["vocab_size"]
    assert loaded.description == "tiny-qwen2: qwen2, 2 layers, 0.1M parameters, float32"


@pytest.mark.parametrize(
    ("model_type", "settings", "name"),
    [
        ("qwen3_moe", TINY_EXPERTS, "model.layers.1.mlp.experts.5.up_proj.weight"),
        ("gemma3_text", TINY_GEMMA, "model.layers.1.pre_feedforward_layernorm.weight"),
    ],
)
def test_other_families_name_a_tensor_that_is_missing_strange_or_misshapen(
    model_type: str, settings: dict[str, Any], name: str, tmp_path: Path
) -> None:
    folder = saved(reference_model(model_type, **settings), tmp_path)

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensor = tensors.pop(name)
        tensors[f"{name}.old"] = tensor
        other = name.replace("layers.1.", "layers.0.")
        tensors[other] = torch.zeros(tensor.shape[0] + 1, *tensor.shape[1:])

    edit_tensors(folder, edit)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    message = str(caught.value)
    assert f"missing (1): {name} (" in message
    assert f"without a place in the model (1): {name}.old (" in message
    assert f"of another shape (1): {name.replace('layers.1.', 'layers.0.')}: (" in message


def test_gemmas_norm_weights_are_stored_less_one(tmp_path: Path) -> None:
    reference = reference_model("gemma3_text", **TINY_GEMMA)
    model = load(saved(reference, tmp_path))
    assert torch.equal(model.norm.weight, reference.model.norm.weight + 1.0)
    assert torch.equal(
        model.layers[0].self_attn.q_norm.weight, reference.model.layers[0].self_attn.q_norm.weight + 1
    )
