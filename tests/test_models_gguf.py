"""Weights from GGUF files: round trips through the package's writer, and what is wrong with bad ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from models_gguf import ARCHITECTURES, gguf_name, interleaved_order, metadata_of, stored_tensors, write_gguf
from models_reference import TINY_EXPERTS, logits_of, reference_logits, reference_model

from sgl_piecewise.models.loading import load_model
from sgl_piecewise.models.rope import LinearScaling, YarnScaling
from sgl_piecewise.models.weights.gguf import load_gguf, open_gguf
from sgl_piecewise.models.weights.placement import checkpoint_views
from sgl_piecewise.runtime.errors import CheckpointError, ConfigError

TOKEN_IDS = torch.randint(0, 96, (100,), generator=torch.Generator().manual_seed(1))


def is_float32(name: str, values: np.ndarray) -> Kind:
    return Kind.F32


def write_model(path: Path, model: Any, choose: Any = is_float32, **changes: Any) -> Path:
    """Writes one of transformers' models; ``changes`` are metadata, without it where None."""
    metadata = {**metadata_of(model.config), **changes}
    return write_gguf(
        path,
        architecture=ARCHITECTURES.get(model.config.model_type, model.config.model_type),
        metadata={key: value for key, value in metadata.items() if value is not None},
        tensors=stored_tensors(model, choose),
    )


def load(path: Path) -> Any:
    return load_gguf(open_gguf(path), device="cpu", dtype=torch.float32)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True}),
        ("llama", {"head_dim": 32, "num_key_value_heads": 1}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 32}),
        ("qwen3_moe", TINY_EXPERTS),
        # Files say neither the pattern of windows nor the scale of scores: they are the published ones.
        (
            "gemma3_text",
            {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16, "num_hidden_layers": 7},
        ),
    ],
)
def test_logits_equal_transformers_in_each_family(
    model_type: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    reference = reference_model(model_type, **settings)
    model = load(write_model(tmp_path / "model.gguf", reference))
    difference = logits_of(model, TOKEN_IDS) - reference_logits(reference, TOKEN_IDS)
    assert difference.abs().max() < 1e-4


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
@pytest.mark.parametrize(
    "kind",
    [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0],
    ids=lambda kind: kind.name,
)
def test_a_quantised_file_gives_its_dequantised_values_in_the_models_row_order(
    kind: Kind, model_type: str, tmp_path: Path
) -> None:
    reference = reference_model(model_type)

    def choose(name: str, values: np.ndarray) -> Kind:
        return kind if values.ndim == 2 else Kind.F32

    stored = stored_tensors(reference, choose)
    views = checkpoint_views(load(write_model(tmp_path / "model.gguf", reference, choose)))
    heads = {"q_proj": 4, "k_proj": 2} if model_type == "llama" else {}
    assert {gguf_name(name) for name in views} == stored.keys()
    for name, view in views.items():
        expected = gguf.dequantize(*stored[gguf_name(name)])
        if (layer := name.split(".")[-2]) in heads:
            restored = np.empty_like(expected)
            restored[interleaved_order(expected.shape[0], heads[layer])] = expected
            expected = restored
        assert np.array_equal(view.numpy(), expected), name
        assert np.abs(expected - reference.state_dict()[name].numpy()).max() < 0.08, name


def dequantisable_kinds() -> list[Kind]:
    """Returns every block quantisation that the installed package can read."""
    kinds = []
    for kind, (_, block_bytes) in gguf.GGML_QUANT_SIZES.items():
        try:
            gguf.dequantize(np.zeros((1, block_bytes), dtype=np.uint8), kind)
        except (NotImplementedError, ValueError):
            continue
        kinds.append(kind)
    return kinds


@pytest.mark.parametrize("kind", dequantisable_kinds(), ids=lambda kind: kind.name)
def test_every_quantisation_that_the_package_reads_can_be_loaded(kind: Kind, tmp_path: Path) -> None:
    """Most have no writer, so one tensor is arbitrary bytes of the right number."""
    reference = reference_model("qwen2", hidden_size=256, num_hidden_layers=1, intermediate_size=32)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    name = "blk.0.ffn_gate.weight"
    raw = np.random.default_rng(0).integers(0, 60, (32, 256 // block_size * block_bytes), dtype=np.uint8)
    tensors = stored_tensors(reference, is_float32) | {name: (raw, kind)}
    path = write_gguf(
        tmp_path / "model.gguf",
        architecture="qwen2",
        metadata=metadata_of(reference.config),
        tensors=tensors,
    )
    view = checkpoint_views(load(path))["model.layers.0.mlp.gate_proj.weight"]
    assert np.array_equal(view.numpy(), gguf.dequantize(raw, kind), equal_nan=True)


def test_the_kinds_above_include_those_in_common_use() -> None:
    common = {Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q8_0, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K}
    assert common <= set(dequantisable_kinds())


def test_llama3_scaling_arrives_as_divisors(tmp_path: Path) -> None:
    """llama.cpp's converter writes it as a tensor, not as settings."""
    parameters = {
        "rope_theta": 500.0,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    reference = reference_model("llama", head_dim=64, rope_parameters=parameters)
    plain = 1.0 / 500.0 ** (np.arange(0, 64, 2, dtype=np.float32) / 64)
    divisors = (plain / reference.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    tensors = stored_tensors(reference, is_float32) | {"rope_freqs.weight": (divisors, Kind.F32)}
    path = write_gguf(tmp_path / "model.gguf", metadata=metadata_of(reference.config), tensors=tensors)
    difference = logits_of(load(path), TOKEN_IDS) - reference_logits(reference, TOKEN_IDS)
    assert difference.abs().max() < 1e-4


def test_divisors_of_another_head_size_raise(tmp_path: Path) -> None:
    reference = reference_model("llama")
    tensors = stored_tensors(reference, is_float32)
    tensors["rope_freqs.weight"] = (np.ones(5, dtype=np.float32), Kind.F32)
    path = write_gguf(tmp_path / "model.gguf", metadata=metadata_of(reference.config), tensors=tensors)
    with pytest.raises(CheckpointError, match=r"holds 5 divisors, but the head size needs 8"):
        load(path)


def test_other_scalings_are_read_from_the_metadata(tmp_path: Path) -> None:
    reference = reference_model("qwen2")
    linear = {"qwen2.rope.scaling.type": "linear", "qwen2.rope.scaling.factor": 2.0}
    yarn = {
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 512,
    }
    unknown = {"qwen2.rope.scaling.type": "longrope"}
    assert open_gguf(
        write_model(tmp_path / "l.gguf", reference, **linear)
    ).config.rope.scaling == LinearScaling(factor=2.0)
    assert open_gguf(write_model(tmp_path / "y.gguf", reference, **yarn)).config.rope.scaling == YarnScaling(
        factor=4.0, original_max_positions=512
    )
    with pytest.raises(ConfigError, match=r"'longrope' is not supported.*linear, none, yarn"):
        _ = open_gguf(write_model(tmp_path / "u.gguf", reference, **unknown)).config


@pytest.fixture(scope="module")
def good_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gguf") / "model.gguf", reference_model("llama"))


def test_load_model_takes_a_file(good_file: Path) -> None:
    loaded = load_model(good_file, device="cpu", dtype=torch.bfloat16)
    assert loaded.tokenizer is None
    assert loaded.description == "model.gguf: llama, 2 layers, 0.1M parameters, bfloat16"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"There is no file .*absent\.gguf"):
        load_model(tmp_path / "absent.gguf", device="cpu", dtype=torch.float32)


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 a zip file", b"\x00" * 64])
def test_a_file_of_another_kind_is_not_taken_for_gguf(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="is not a GGUF file: it begins with"):
        open_gguf(path)


def test_a_file_cut_anywhere_is_called_truncated(good_file: Path, tmp_path: Path) -> None:
    whole = good_file.read_bytes()
    cut = tmp_path / "cut.gguf"
    lengths = [4, 5, 8, 12, 23, 24, 30, 100, 333, 777, 1500, 2048, 4096, len(whole) // 2, len(whole) - 33]
    for length in lengths:
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="is truncated or damaged"):
            open_gguf(cut)


def test_a_file_with_a_flipped_byte_in_its_header_loads_or_raises_our_error(
    good_file: Path, tmp_path: Path
) -> None:
    whole = bytearray(good_file.read_bytes())
    damaged = tmp_path / "damaged.gguf"
    num_loaded = num_refused = 0
    for position in range(4, 1200, 7):
        changed = whole.copy()
        changed[position] ^= 0xFF
        damaged.write_bytes(changed)
        try:
            load(damaged)
            num_loaded += 1
        except (CheckpointError, ConfigError):
            num_refused += 1
    assert num_loaded > 0, "no byte was of a name or a number that nothing hangs on"
    assert num_refused > 0, "damage to the header was never noticed"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.block_count": None}, "'block_count' is missing"),
        ({"llama.expert_count": 8}, "llama.expert_count is 8; only 0"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8; only 16"),
        ({"llama.block_count": 3}, r"missing \(9\): blk\.2\.attn_norm\.weight"),
        (
            {"llama.feed_forward_length": 64},
            r"blk.0.ffn_gate.weight: \(96, 64\) in the checkpoint, \(64, 64\)",
        ),
        ({"split.count": 3}, "is one of 3 parts"),
    ],
)
def test_metadata_that_does_not_fit_raises(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", reference_model("llama"), **changes)
    with pytest.raises(CheckpointError, match=message):
        load(path)


def test_a_tensor_without_a_place_is_named_in_the_files_own_words(tmp_path: Path) -> None:
    reference = reference_model("llama")
    tensors = stored_tensors(reference, is_float32)
    tensors["blk.0.attn_sinks.weight"] = (np.zeros(4, dtype=np.float32), Kind.F32)
    path = write_gguf(tmp_path / "model.gguf", metadata=metadata_of(reference.config), tensors=tensors)
    with pytest.raises(CheckpointError, match=r"without a place in the model \(1\): blk\.0\.attn_sinks"):
        load(path)


def test_an_unknown_architecture_lists_the_known(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", architecture="mamba", metadata={}, tensors={})
    with pytest.raises(CheckpointError, match=r"'mamba' is not supported.*llama, qwen2, qwen3"):
        load(path)


def test_a_vocabulary_alone_is_not_a_model(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "vocab.gguf", metadata=metadata_of(reference_model("llama").config), tensors={}
    )
    with pytest.raises(CheckpointError, match="not a whole language model"):
        load(path)
