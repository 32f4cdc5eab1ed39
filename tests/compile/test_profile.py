"""Compile-time profiles: nearly all wall time is named work, and the facts are those of the build."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl_piecewise import capture, eager_on_graph
from sgl_piecewise.models.decoder import Decoder
from sgl_piecewise.models.shapes import named_shape
from sgl_piecewise.models.weights.random import random_decoder
from sgl_piecewise.profiling.reading import read_profile
from sgl_piecewise.runtime.attention.causal import CausalAttention
from sgl_piecewise.runtime.build_profile import BuildProfile
from sgl_piecewise.runtime.capture.device import GraphDevice
from sgl_piecewise.runtime.context import ForwardContext, use_forward_context
from sgl_piecewise.runtime.errors import ConfigError
from sgl_piecewise.runtime.time_line import listening
from sgl_piecewise.runtime.torch_private_events import phase_of_event

from .support import compiled

LEAST_ATTRIBUTED = 0.95
SIZES = (4, 8)


@pytest.fixture(autouse=True)
def attention() -> Iterator[None]:
    with use_forward_context(ForwardContext(attention=CausalAttention())):
        yield


@pytest.fixture
def model() -> Decoder:
    return random_decoder(named_shape("tiny"), device=torch.device("cpu"), dtype=torch.float32)


def tokens(num: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(num), torch.arange(num)


def check_sums(profile: BuildProfile) -> None:
    """Named work and the rest are the whole, and spans lie inside the ones around them."""
    assert sum(profile.phases_s.values()) + profile.unattributed_s == pytest.approx(profile.total_s, abs=1e-6)
    for one in profile.spans:
        assert 0.0 <= one.begin_s <= one.end_s <= profile.total_s + 1e-6
        if one.parent is not None:
            around = profile.spans[one.parent]
            assert around.begin_s <= one.begin_s
            assert one.end_s <= around.end_s


@pytest.mark.timeout(600)  # the first run of all compiles for real, and finds out about the host's compiler
@pytest.mark.parametrize("piece_compiler", [None, "fx", "inductor"])
def test_at_least_95_percent_of_a_build_is_named_work(
    graph_device: GraphDevice, tmp_path: Path, piece_compiler: str | None
) -> None:
    path, device = tmp_path / "profile.json", graph_device.torch_device
    model = random_decoder(named_shape("tiny"), device=device, dtype=torch.float32)
    example = tuple(one.to(device) for one in tokens(8))
    options: dict[str, Any] = {"capture_sizes": SIZES, "device": graph_device, "profile": path}
    capture(model, example, compile=piece_compiler, **options)
    profile = read_profile(path)
    check_sums(profile)
    # Without a compiler a build is over so soon that one pause of the host would be 5% of it.
    pause_s = 0.02 if piece_compiler is None else 0.0
    most_unattributed_s = max(pause_s, (1 - LEAST_ATTRIBUTED) * profile.total_s)
    assert profile.unattributed_s <= most_unattributed_s, profile.phases_s
    assert [size.size for size in profile.sizes] == [8, 4]
    assert all(size.warm_up_s > 0 and size.capture_s > 0 for size in profile.sizes)
    assert profile.facts["emulated"] == str(graph_device.is_emulated)
    if piece_compiler is None:
        assert not profile.traces
        return
    assert len(profile.traces) == 2, "the decoder, and its layers once"
    assert profile.traces[0].num_layer_calls == 2
    assert {"dynamo trace", "dynamo guards", "graph passes"} <= set(profile.phases_s)
    assert listening() == ()


def test_pieces_say_key_outcome_and_kernels(model: Decoder, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    options = {"cache_folder": tmp_path / "cache"}
    for expected in ("miss", "hit"):
        torch.compiler.reset()
        capture(
            lambda x: torch.relu(x @ x) + 1,
            (torch.ones(4, 4),),
            compile="inductor",
            compile_options=options,
            profile=path,
        )
        (piece,) = read_profile(path).pieces
        assert piece.cache == expected
        assert len(piece.key) == 32
        assert any(name.startswith("cpp_fused") for name in piece.kernels)
        assert "extern_kernels.mm" in piece.kernels
    assert "inductor lowering" not in read_profile(path).phases_s


def test_equal_layers_that_are_traced_one_by_one_are_counted_with_their_cost(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"

    @eager_on_graph(fake=torch.empty_like)
    def mix(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1)

    def layers(x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = mix(torch.sin(x) * 2)
        return x

    compiled(layers, piece_compiler="fx", profile=path)(torch.ones(4))
    profile = read_profile(path)
    (trace,) = profile.traces
    assert trace.function.startswith("layers (test_profile.py:")
    assert (trace.num_pieces, trace.num_distinct_pieces, trace.most_uses) == (6, 1, 6)
    assert (trace.num_operators, trace.num_repeated_operators) == (12, 10)
    assert trace.repeated_trace_s == pytest.approx(trace.trace_s * 10 / 12)
    assert [piece.num_uses for piece in profile.pieces] == [6]


@pytest.mark.parametrize("piece_compiler", ["fx", "inductor"])
def test_the_backends_own_profile_begins_with_the_trace_and_ends_with_the_guards(
    tmp_path: Path, piece_compiler: str
) -> None:
    """The backend is called in the middle of both."""
    path = tmp_path / "profile.json"
    compiled(lambda x: torch.sin(x) * 2, piece_compiler=piece_compiler, profile=path)(torch.ones(4))
    profile = read_profile(path)
    check_sums(profile)
    assert profile.phases_s["dynamo trace"] > 0
    assert profile.phases_s["dynamo guards"] > 0
    assert profile.attributed_share >= LEAST_ATTRIBUTED - 0.1, "next to nothing is compiled here"
    assert listening() == ()


def test_the_backends_own_profile_holds_every_compile_of_the_process(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    for function in (torch.sin, torch.cos, torch.tan):
        compiled(lambda x, f=function: f(x), piece_compiler="fx", profile=path)(torch.ones(4))
    profile = read_profile(path)
    check_sums(profile)
    assert len(profile.traces) == len(profile.pieces) == 3


def test_a_compile_that_fails_stops_listening(tmp_path: Path) -> None:
    def refuse(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> None:
        raise RuntimeError("not this one")

    with pytest.raises(Exception, match="not this one"):
        compiled(torch.sin, piece_compiler=refuse, profile=tmp_path / "profile.json")(torch.ones(4))
    assert listening() == ()


def test_a_build_that_fails_writes_no_profile(tmp_path: Path) -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise KeyError(x)

    path = tmp_path / "profile.json"
    with pytest.raises(KeyError):
        capture(fails, (torch.ones(4),), profile=path)
    assert not path.exists()
    assert listening() == ()


def test_a_profile_that_cannot_be_written_is_refused_before_the_build(tmp_path: Path) -> None:
    def never(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("it ran")

    with pytest.raises(ConfigError, match="Make it first"):
        capture(never, (torch.ones(4),), profile=tmp_path / "none" / "profile.json")


def test_a_profile_changes_no_values_and_no_segments(model: Decoder, tmp_path: Path) -> None:
    plain = capture(model, tokens(8), capture_sizes=SIZES)
    profiled = capture(model, tokens(8), capture_sizes=SIZES, profile=tmp_path / "profile.json")
    assert torch.equal(plain(*tokens(3)), profiled(*tokens(3)))
    assert plain.describe() == profiled.describe()


def test_a_profile_is_plain_json_with_its_form_named(model: Decoder, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    capture(model, tokens(8), capture_sizes=SIZES, profile=path)
    document = json.loads(path.read_text())
    assert document["schema"] == "sgl-piecewise.build-profile"
    assert document["schema_version"] == 2


@pytest.mark.parametrize(
    ("event", "phase"),
    [
        ("entire_frame_compile", None),
        ("compile_attempt_0", "dynamo trace"),
        ("Scheduler.codegen", "inductor code generation"),
        ("CachingAutotuner.benchmark_all_configs", "autotune"),
        ("async_compile.wait", "kernel compile"),
        ("AOTAutogradCache.inductor_load", "cache load"),
        ("an event of a later version", ""),
    ],
)
def test_events_of_pytorch_have_their_phases(event: str, phase: str | None) -> None:
    assert phase_of_event(event) == phase
