"""Compile values of a plan: one compile for every size of every runner, values as uncompiled."""

from __future__ import annotations

import pytest
import torch

from sgl_piecewise.generation.compiling import CompiledModel
from sgl_piecewise.runtime.batch.forward_mode import ForwardMode
from sgl_piecewise.runtime.errors import ConfigError
from sgl_piecewise.runtime.model_runner.model_runner import ModelRunner
from sgl_piecewise.runtime.model_runner.options import RunnerOptions
from sgl_piecewise.runtime.runners.plan import ExecutionPlan, ModeStrategy

from .support import OPTIONS, Walk, make_runner, plan, tiny_model


def compiled_plan(decode: str, extend: str, compiler: str) -> ExecutionPlan:
    modes = {}
    for mode, strategy in plan(decode, extend).modes.items():
        modes[mode] = ModeStrategy(
            strategy=strategy.strategy,
            compile=compiler,
            capture_sizes=strategy.capture_sizes,
            num_tokens_per_req=strategy.num_tokens_per_req,
        )
    return ExecutionPlan(modes=modes)


@pytest.mark.parametrize(
    ("compiler", "decode", "extend"),
    [
        ("fx", "full", "breakable"),
        pytest.param("inductor", "full", "breakable", marks=pytest.mark.slow),  # A minute on two cores.
    ],
)
def test_compiled_forwards_give_what_uncompiled_ones_give(compiler: str, decode: str, extend: str) -> None:
    reference = Walk(make_runner(plan("none", "none"))).play()
    runner = ModelRunner.ready(
        tiny_model(), plan=compiled_plan(decode, extend, compiler), options=OPTIONS, compiler=CompiledModel
    )
    assert runner.graph_build is not None
    assert runner.graph_build.failures == {}
    walk = Walk(runner).play()
    assert f"decode decode {decode}" in walk.executions
    for step, ours, theirs in zip(walk.executions, walk.logits, reference.logits, strict=True):
        if theirs is not None:
            assert ours is not None, step
            assert torch.allclose(ours, theirs, atol=0 if compiler == "fx" else 1e-4, rtol=0), step


def test_a_compile_value_that_nobody_knows_is_refused_with_the_nearest() -> None:
    asked = ExecutionPlan(modes={ForwardMode.DECODE: ModeStrategy(strategy="none", compile="inductr")})
    with pytest.raises(ConfigError, match="did you mean 'inductor'"):
        ModelRunner.ready(tiny_model(), plan=asked, options=OPTIONS, compiler=CompiledModel)


def test_a_compile_value_without_a_compiler_is_refused() -> None:
    asked = ExecutionPlan(modes={ForwardMode.DECODE: ModeStrategy(strategy="none", compile="fx")})
    with pytest.raises(ConfigError, match="without a compiler"):
        ModelRunner.ready(tiny_model(), plan=asked, options=OPTIONS)


def test_one_short_request_at_a_time_can_be_compiled_for() -> None:
    """The size to trace with is over the largest that a batch can have, and so two requests long."""
    modes = {
        ForwardMode.DECODE: ModeStrategy(strategy="full", compile="fx"),
        ForwardMode.EXTEND: ModeStrategy(),
        ForwardMode.MIXED: ModeStrategy(),
    }
    asked = ExecutionPlan(modes=modes)
    options = RunnerOptions(max_requests=1, max_context=2, max_extend_tokens=2)
    runner = ModelRunner.ready(tiny_model(), plan=asked, options=options, compiler=CompiledModel)
    assert runner.graph_build is not None
    assert runner.graph_build.failures == {}
