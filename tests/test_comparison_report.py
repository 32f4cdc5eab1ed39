"""The report: its JSON file, its table, and what its verdict may claim."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import random
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from comparison_arms import SmallModel, check_schema, small_inputs
from rich.console import Console

from sgl_piecewise.comparison import compare, report_from_json, write_report
from sgl_piecewise.comparison.end_to_end.report import (
    DecodeRate,
    EndToEndReport,
    PhaseReport,
    PlanAttention,
    PlanReport,
)
from sgl_piecewise.comparison.intervals import median_of
from sgl_piecewise.comparison.records import (
    Case,
    CaseProblem,
    CaseTimes,
    CaseValues,
    FirstDifference,
    GraphMemory,
    StrategyReport,
)
from sgl_piecewise.comparison.report import (
    SCHEMA,
    ComparisonReport,
    EagerSweep,
    Environment,
    InputFacts,
    ModelFacts,
    check_can_write,
)
from sgl_piecewise.comparison.schema import schema_text
from sgl_piecewise.comparison.table import print_report
from sgl_piecewise.comparison.verdict import fastest_at, verdict_of
from sgl_piecewise.runtime.errors import ConfigError
from sgl_piecewise.runtime.records import BuildRecord, SizeBuild

COUNTS = (16, 256, 4096)
EAGER_MS = {16: (68.0, 67.0), 256: (68.5, 66.0), 4096: (140.6, 70.0)}
"""Latency and host time: launch-bound up to 256, as on the H200 of the design."""


def eager_ms(count: int) -> tuple[float, float]:
    """Latency and host time of eager."""
    return EAGER_MS.get(count, EAGER_MS[16])


def times_of(strategy: str, latency_ms: float, host_ms: float, eager_ms: float | None) -> dict[str, Any]:
    """Five rounds around a latency, one per cent up and down, each strategy in its own order."""
    steps = random.Random(strategy).sample((-1, -0.5, 0, 0.5, 1), 5)
    rounds = [latency_ms * (1 + 0.01 * step) / 1e3 for step in steps]
    ratios = None if eager_ms is None else median_of([own * 1e3 / eager_ms for own in rounds])
    return {
        "latency_s": median_of(rounds),
        "host_s": median_of([host_ms / 1e3] * 5),
        "ratio_to_eager": ratios,
        "samples_s": tuple(rounds),
    }


def gpu_strategy(strategy: str, latencies_ms: dict[int, float], **changes: Any) -> StrategyReport:
    """A strategy as a GPU would report it."""
    is_eager = strategy == "eager"
    times = tuple(
        CaseTimes(
            num_tokens=count,
            padded_size=count,
            **times_of(
                strategy,
                latency,
                eager_ms(count)[1] if is_eager else 0.4,
                None if is_eager else eager_ms(count)[0],
            ),
        )
        for count, latency in latencies_ms.items()
    )
    values = tuple(
        CaseValues(
            num_tokens=count,
            padded_size=count,
            max_diff_to_padded_eager=0.0,
            max_diff_to_eager=0.015625,
            next_token_agreement=0.9971,
        )
        for count in COUNTS
    )
    sizes = tuple(
        SizeBuild(
            size=count,
            warm_up_s=0.1,
            capture_s=0.2,
            num_graph_segments=37,
            num_breaks=36,
            reserved_bytes=902_000_000,
            driver_bytes=5_000_000,
        )
        for count in reversed(COUNTS)
    )
    build = BuildRecord(
        strategy=strategy,
        device="NVIDIA H200",
        is_emulated=False,
        segments_launched=False,
        total_s=4.8,
        phases_s={"warm_up": 2.0, "capture": 2.6},
        sizes=sizes,
    )
    memory = GraphMemory(
        allocator_bytes=908_000_000, largest_alone_bytes=902_000_000, driver_bytes=15_000_000
    )
    facts: dict[str, Any] = {
        "strategy": strategy,
        "status": "reference" if is_eager else "equal",
        "build": None if is_eager else build,
        "memory": None if is_eager else memory,
        "values": values,
        "times": times,
    }
    return StrategyReport(**{**facts, **changes})


def gpu_report(
    *others: StrategyReport, is_emulated: bool = False, end_to_end: EndToEndReport | None = None
) -> ComparisonReport:
    """A report as a GPU would give it, verdict included."""
    eager = gpu_strategy("eager", {count: EAGER_MS[count][0] for count in COUNTS})
    report = ComparisonReport(
        created="2026-01-01T00:00:00+00:00",
        command=("sgl-piecewise", "compare"),
        options={"num_rounds": 5},
        environment=Environment(
            device="NVIDIA H200",
            torch_device="cuda:0",
            is_emulated=is_emulated,
            platform="Linux",
            num_cpu_threads=16,
            versions={"torch": "2.11"},
            clocks=(),
        ),
        model=ModelFacts(
            name="qwen3-8b", description="qwen3-8b shape", dtype="bfloat16", num_parameters=8, load_s=1.0
        ),
        inputs=InputFacts(source="random", num_tokens=10, is_repeated=True, is_random=True),
        capture_sizes=COUNTS,
        cases=tuple(Case(num_tokens=count, capture_size=count, num_inputs=2) for count in COUNTS),
        eager_sweep=EagerSweep(first_s=5.0, warm_s=4.0, num_forwards=3),
        first_capture_s=0.1,
        strategies=(eager, *others),
        end_to_end=EndToEndReport(why_none="they were not asked for") if end_to_end is None else end_to_end,
        verdict="",
    )
    return dataclasses.replace(report, verdict=verdict_of(report))


FULL = gpu_strategy("full", {16: 8.81, 256: 12.0, 4096: 141.1})
BREAKABLE = gpu_strategy("breakable", {16: 8.96, 256: 12.3, 4096: 141.0})


def shown(report: ComparisonReport, width: int = 80) -> str:
    """The printed report."""
    stream = io.StringIO()
    print_report(report, Console(file=stream, width=width))
    return stream.getvalue()


# JSON


def test_report_survives_json_and_fits_the_shipped_schema() -> None:
    report = compare(SmallModel(), small_inputs(3, 4), ["full"], num_rounds=2)
    assert report_from_json(report.to_json()) == report
    schema = json.loads(resources.files("sgl_piecewise").joinpath("data", "compare.schema.json").read_text())
    plain = json.loads(report.to_json())
    assert next(iter(plain)) == "schema"
    check_schema(plain, schema, schema["$defs"])
    with pytest.raises(AssertionError, match="cases"):
        check_schema({**plain, "cases": 3}, schema, schema["$defs"])


def test_shipped_schema_is_that_of_the_code() -> None:
    """A change of layout needs a new version in `SCHEMA`, and the file made again by `schema_text`."""
    shipped = resources.files("sgl_piecewise").joinpath("data", "compare.schema.json").read_text()
    assert shipped == schema_text()
    assert SCHEMA in shipped


def test_wrong_and_partial_strategies_survive_json() -> None:
    difference = FirstDifference(
        num_tokens=16, padded_size=16, input_index=0, index=(3, 4), expected="1.0", got="nan"
    )
    wrong = gpu_strategy("full", {}, status="wrong", first_difference=difference)
    partial = gpu_strategy(
        "breakable", {16: 9.0}, problems=(CaseProblem(num_tokens=256, reason="out of memory"),)
    )
    report = gpu_report(wrong, partial)
    assert report_from_json(report.to_json()) == report


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "Not a comparison report"),
        ("[]", "schema None"),
        ('{"schema": "sgl_piecewise.compare/99"}', "compare/99"),
        (json.dumps({"schema": SCHEMA}), "'created' is missing"),
    ],
)
def test_files_that_are_no_report_are_refused(text: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        report_from_json(text)


def test_a_field_of_another_type_is_named_by_its_path() -> None:
    plain = json.loads(gpu_report(FULL).to_json())
    plain["strategies"][1]["times"][0]["latency_s"]["value"] = "fast"
    with pytest.raises(
        ConfigError, match=r"report\.strategies\[1\]\.times\[0\]\.latency_s\.value.*float.*'fast'"
    ):
        report_from_json(json.dumps(plain))


def test_a_failed_write_leaves_the_old_file_and_no_scratch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "report.json"
    path.write_text("old")
    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_report(gpu_report(FULL), path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.json"]


def test_a_path_that_cannot_be_written_is_found_before_and_left_untouched(tmp_path: Path) -> None:
    for path, word in ((tmp_path, "folder"), (tmp_path / "none" / "r.json", "Make it first")):
        with pytest.raises(ConfigError, match=word):
            check_can_write(path)
    check_can_write(tmp_path / "r.json")
    assert os.listdir(tmp_path) == []


# Table


@pytest.mark.parametrize("width", [80, 100, 140])
def test_table_fits_the_console_and_holds_what_was_asked(width: int) -> None:
    text = shown(gpu_report(FULL, BREAKABLE), width)
    assert max(map(len, text.splitlines())) <= width
    for fact in (
        "4.80 s", "2.60 s", "37", "36", "908 MB", "902 MB", "15.0 MB", "0.016", "99.71 %",
        "8.96 ±0.04 ms", "0.13 [0.13, 0.13]", "repeated", "bit-equal", "1.20",
    ):  # fmt: skip
        assert fact in text, fact
    assert "emulated" not in text


def test_strategies_that_do_not_fit_go_into_a_second_table_with_eager() -> None:
    many = [dataclasses.replace(FULL, strategy=f"cell_{index}") for index in range(5)]
    text = shown(gpu_report(*many))
    assert max(map(len, text.splitlines())) <= 80
    heads = [line.split() for line in text.splitlines() if line.strip().startswith("strategy ")]
    assert heads == [
        ["strategy", "eager", "cell_0", "cell_1"],
        ["strategy", "eager", "cell_2", "cell_3"],
        ["strategy", "eager", "cell_4"],
    ]


def test_emulated_stands_in_the_title_and_forbids_claims() -> None:
    report = gpu_report(FULL, BREAKABLE, is_emulated=True)
    assert shown(report).splitlines()[1].strip() == "emulated: times say nothing about a GPU"
    assert not re.search("fastest|level|launch-bound|Building", report.verdict)
    assert "bit for bit" in report.verdict


def test_a_wrong_strategy_shows_no_time() -> None:
    difference = FirstDifference(
        num_tokens=256, padded_size=256, input_index=1, index=(3, 4), expected="1.0", got="nan"
    )
    report = gpu_report(gpu_strategy("full", {}, status="wrong", first_difference=difference))
    text = shown(report)
    rows = [line for line in text.splitlines() if re.match(r" (16|256|4096) ", line)]
    assert [row.split()[-2:] for row in rows] == [["no", "speed"]] * len(COUNTS)
    assert "WRONG" in text
    assert "padded eager has 1.0 and it has nan" in " ".join(text.split())
    assert "full" not in fastest_at(report, 256)


def test_a_size_out_of_memory_is_shown_as_such() -> None:
    partial = gpu_strategy(
        "full", {16: 8.8, 256: 12.0}, problems=(CaseProblem(num_tokens=4096, reason="out of memory: 1 GiB"),)
    )
    text = shown(gpu_report(partial))
    assert "out of memory" in next(line for line in text.splitlines() if line.startswith(" 4096"))
    assert "full at 4096 tokens: out of memory: 1 GiB" in text


def gpu_plan(plan: str, first_ms: float, step_ms: float, **changes: Any) -> PlanReport:
    """A plan as a GPU would report it, at one prompt length and one batch size."""
    is_eager = plan == "eager"
    phases = [
        PhaseReport(
            times=(
                CaseTimes(
                    num_tokens=size,
                    padded_size=size,
                    **times_of(plan, latency, latency, None if is_eager else eager),
                ),
            )
        )
        for size, latency, eager in ((64, first_ms, 40.0), (8, step_ms, 30.0))
    ]
    rate = DecodeRate(batch_size=8, tokens_per_s=median_of([8e3 / step_ms] * 5))
    facts: dict[str, Any] = {
        "plan": plan,
        "attention": PlanAttention(prompts="flashinfer", decode="triton"),
        "status": "reference" if is_eager else "equal",
        "first_token": phases[0],
        "decode": phases[1],
        "decode_rates": (rate,),
    }
    return PlanReport(**{**facts, **changes})


END_TO_END = EndToEndReport(
    why_none=None,
    prompt_lengths=(64,),
    batch_sizes=(8,),
    context_tokens=1024,
    plans=(
        gpu_plan("eager", 40.0, 30.0),
        gpu_plan("full+breakable", 12.0, 4.0),
        gpu_plan(
            "full",
            11.0,
            4.0,
            status="left_out",
            first_token=PhaseReport(),
            decode=PhaseReport(),
            decode_rates=(),
            failure="why",
        ),
    ),
)


@pytest.mark.parametrize("width", [80, 140])
def test_plans_have_a_table_of_their_own(width: int) -> None:
    report = gpu_report(FULL, end_to_end=END_TO_END)
    assert report_from_json(report.to_json()) == report
    text = shown(report, width)
    assert max(map(len, text.splitlines())) <= width
    for fact in (
        "triton+flashinfer",
        "12.0 ±0.06 ms",
        "0.30 [0.30, 0.30]",
        "2000 ±0.00",
        "left out",
        "full end to end: why",
    ):
        assert fact in text, fact
    assert "No end-to-end arms: they were not asked for." in shown(gpu_report(FULL))


def test_verdict_says_which_plan_is_fastest_to_first_tokens_and_in_decoding() -> None:
    verdict = gpu_report(FULL, end_to_end=END_TO_END).verdict
    assert (
        "To the first token of a prompt, at 64 tokens full+breakable is fastest (0.30 of eager's latency)."
        in verdict
    )
    assert "Decoding, at 8 requests full+breakable is fastest (0.13 of eager's latency)." in verdict
    assert "full was left out of the end-to-end arms: why." in verdict
    assert "Decoding" not in gpu_report(FULL, end_to_end=END_TO_END, is_emulated=True).verdict


# Verdict


def test_verdict_says_who_wins_where_and_why() -> None:
    verdict = gpu_report(FULL, gpu_strategy("breakable", {16: 9.5, 256: 12.9, 4096: 141.0})).verdict
    assert (
        "full and breakable agree with padded eager bit for bit at 3 token counts from 16 to 4096" in verdict
    )
    assert "From 16 to 256 tokens full is fastest (0.13 to 0.18 of eager's latency)." in verdict
    assert "At 4096 tokens eager, full and breakable are level" in verdict
    assert "Eager is launch-bound up to 256 tokens" in verdict
    assert "from 4096 on the device is the limit" in verdict
    assert "Building full took 4.80 s, 1.20 times one eager forward at each of 3 capture sizes" in verdict
    assert "908 MB by the allocator and 15.0 MB by the driver" in verdict


def test_strategies_within_each_others_interval_are_level() -> None:
    report = gpu_report(FULL, gpu_strategy("breakable", {16: 8.81, 256: 12.6, 4096: 141.0}))
    assert fastest_at(report, 16) == ("full", "breakable")
    assert fastest_at(report, 256) == ("full",)


def test_verdict_stays_short_where_winners_alternate() -> None:
    counts = tuple(range(1, 13))
    ahead, behind = (
        {count: 8.0 + count % 2 for count in counts},
        {count: 9.0 - count % 2 for count in counts},
    )
    report = gpu_report(gpu_strategy("full", ahead), gpu_strategy("breakable", behind))
    cases = tuple(Case(num_tokens=count, capture_size=count, num_inputs=2) for count in counts)
    verdict = verdict_of(dataclasses.replace(report, cases=cases))
    assert "full is fastest, or level with the fastest, at 6 of 12 token counts, between 2 and 12" in verdict
    assert "breakable is fastest, or level with the fastest, at 6 of 12" in verdict


def test_verdict_does_not_call_a_device_bound_eager_launch_bound() -> None:
    report = gpu_report(FULL)
    free = tuple(dataclasses.replace(times, host_s=median_of([1e-3])) for times in report.eager.times)
    eager = dataclasses.replace(report.eager, times=free)
    report = dataclasses.replace(report, strategies=(eager, *report.strategies[1:]))
    assert "nowhere launch-bound" in verdict_of(report)
