"""Profiles for readers: files of other forms are refused; table, page and trace say what the profile says."""

from __future__ import annotations

import io
import itertools
import json
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from sgl_piecewise import cli
from sgl_piecewise.compiler import forward, layer_runner
from sgl_piecewise.profiling.build import cell_of
from sgl_piecewise.profiling.chrome_trace import chrome_trace
from sgl_piecewise.profiling.groups import GROUPS
from sgl_piecewise.profiling.page import profile_page, rows_of
from sgl_piecewise.profiling.reading import profile_from_json, read_profile
from sgl_piecewise.profiling.table import rendered_profiles, summary
from sgl_piecewise.runtime.build_profile import BuildProfile, profile_of
from sgl_piecewise.runtime.errors import ConfigError
from sgl_piecewise.runtime.records import PoolEstimate, PoolReservation
from sgl_piecewise.runtime.time_line import CONTAINER, TimeLine, listen, span

QUICK = ("tiny", "--device", "cpu", "--capture-sizes", "4,8")


def small_profile(cache: str = "miss", key: str = "abc") -> BuildProfile:
    """A build with one trace, one piece and one size."""
    line = TimeLine()
    with listen(line), span("build", CONTAINER):
        with span("dynamo", CONTAINER, co_name="forward", co_filename="/x/model.py", co_firstlineno=7):
            with span("bytecode_tracing", "dynamo trace"):
                pass
            with span("backend", CONTAINER):
                with span("split", "graph passes") as noted:
                    noted.note(num_pieces=3, num_distinct_pieces=1, num_operators=6, num_repeated_operators=4)
                    noted.note(most_uses=3, uses=["piece_0=3"])
                with span("compile piece", "piece compiler", piece="piece_0", cache=cache, key=key):
                    pass
        with span("warm_up", "warm_up", size=8):
            pass
        with span("capture", "capture", size=8):
            pass
    line.finish()
    return profile_of([line], {"strategy": "fx_piecewise", "emulated": "True", "description": "A <model>"})


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, [*arguments], env={"COLUMNS": "100", "TERM": "dumb"})


def text_of(profiles: dict[str, BuildProfile]) -> str:
    written = io.StringIO()
    Console(width=100, file=written).print(rendered_profiles(profiles))
    return written.getvalue()


def test_a_profile_survives_its_file() -> None:
    profile = small_profile()
    assert profile_from_json(json.dumps(asdict(profile))) == profile


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"schema_version": 3}, "newer version"),
        ({"schema_version": "1"}, "newer version"),
        ({"schema": "something"}, "expected 'sgl-piecewise.build-profile'"),
        ({"total_s": "long"}, "profile.total_s"),
        ({"spans": [{"name": 3}]}, r"profile.spans\[0\]"),
    ],
)
def test_a_file_of_another_form_is_refused_with_its_reason(change: dict[str, object], word: str) -> None:
    document = {**asdict(small_profile()), **change}
    with pytest.raises(ConfigError, match=word):
        profile_from_json(json.dumps(document))


def test_a_file_that_is_no_json_or_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        read_profile(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="no profile"):
        read_profile(path)


def test_the_table_shows_profiles_side_by_side() -> None:
    text = text_of({"cold": small_profile("miss"), "warm": small_profile("hit")})
    assert "emulated: times say nothing about a GPU" in text
    assert re.search(r"named work +cold +share +warm +share", text)
    assert re.search(r"^ *unattributed ", text, re.MULTILINE)
    assert "cold: 1 piece compiled: 1 miss" in text
    assert "warm: 1 piece compiled: 1 hit" in text


def test_the_summary_says_what_equal_layers_cost() -> None:
    (line,) = [line for line in summary(small_profile()) if "one by one" in line]
    assert "1 trace with 3 pieces" in line
    assert "used 3 times" in line


def test_the_page_needs_nothing_from_outside_and_cannot_be_broken_by_names() -> None:
    profile = small_profile(key="</script><b>")
    page = profile_page({"cold": profile, "warm": small_profile("hit")})
    assert "<title>A &lt;model&gt;, fx_piecewise</title>" in page
    assert not re.search(r"https?://|<link|<img|@import|url\(|\bsrc=", page)
    assert page.count("<script") == page.count("</script>") == 2
    (data,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    shown = json.loads(data)
    assert [one["name"] for one in shown["profiles"]] == ["cold", "warm"]
    assert shown["groups"] == list(GROUPS)
    for number in range(len(GROUPS)):
        assert page.count(f"--g{number}:") == 2, "a colour for each group, in light and in dark"


def test_rows_are_the_build_then_traces_pieces_and_sizes() -> None:
    profile = small_profile()
    rows = rows_of(profile)
    labels = ["whole build", "forward (model.py:7)", "piece_0", "size 8"]
    assert [row["label"] for row in rows] == labels
    assert rows[2]["details"]["key"] == "abc"
    whole = rows[0]["segments"]
    assert whole[0]["begin"] == 0.0
    assert whole[-1]["end"] == pytest.approx(profile.total_s)
    for before, after in itertools.pairwise(whole):
        assert before["end"] == pytest.approx(after["begin"])
    named = sum(one["end"] - one["begin"] for one in whole if one["phase"] == "capture")
    assert named == pytest.approx(profile.phases_s["capture"], abs=1e-6)


def test_the_trace_holds_every_span_in_microseconds() -> None:
    profile = small_profile()
    trace = json.loads(chrome_trace({"cold": profile}))
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(complete) == len(profile.spans)
    assert complete[0]["dur"] == pytest.approx(profile.spans[0].duration_s * 1e6)
    assert [event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"] == ["cold"]
    assert "compile piece piece_0" in [event["name"] for event in complete]


@pytest.mark.parametrize(
    ("strategy", "cell"),
    [
        ("breakable", (None, "breakable")),
        ("full", (None, "full")),
        ("tc_piecewise", ("inductor", "breakable")),
        ("tc", ("inductor", "none")),
        ("fx_full", ("fx", "full")),
        ("openvino_piecewise", ("openvino", "breakable")),
    ],
)
def test_a_strategys_name_says_what_compiles_and_what_captures(
    strategy: str, cell: tuple[str | None, str]
) -> None:
    assert cell_of(strategy) == cell


@pytest.mark.parametrize(
    ("strategy", "hint"),
    [
        ("bogus", "Known: breakable"),
        ("tc_piecewize", "did you mean 'tc_piecewise'"),
        ("bogus_full", "fx_full"),
    ],
)
def test_a_strategy_that_is_none_is_named_with_the_nearest(strategy: str, hint: str) -> None:
    result = invoke("profile", *QUICK, "--strategy", strategy)
    assert result.exit_code == 2
    shown = " ".join(result.output.split())
    assert f"Unknown strategy '{strategy}'" in shown
    assert hint in shown
    assert "piece compiler" not in shown


# The commands ------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["breakable", "fx_piecewise", "fx"])
def test_the_command_writes_all_that_it_is_asked_for(tmp_path: Path, strategy: str) -> None:
    files = {name: tmp_path / f"build.{name}" for name in ("json", "html", "trace")}
    options = [text for name, path in files.items() for text in (f"--{name}", str(path))]
    result = invoke("profile", *QUICK, "--strategy", strategy, *options)
    assert result.exit_code == 0, result.output
    assert "unattributed" in result.stdout
    profile = read_profile(files["json"])
    assert profile.facts["strategy"] == strategy
    assert profile.attributed_share >= 0.95
    assert len(profile.sizes) == 2
    assert all(size.first_replay_s is not None for size in profile.sizes)
    assert files["html"].read_text().startswith("<!DOCTYPE html>")
    assert json.loads(files["trace"].read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--strategy", "eager"], "nothing to profile"),
        (["--strategy", "inductr_piecewise"], "did you mean 'tc_piecewise'"),
        (["--html", "/no/such/folder/page.html"], "Make it first"),
        (["--capture-sizes", "8,4"], "ascend"),
        (["--strategy", "fx_piecewise", "--cache-folder", "x"], "only what Inductor compiled is kept"),
    ],
)
def test_a_request_that_cannot_be_met_is_a_message(arguments: list[str], word: str) -> None:
    result = invoke("profile", *QUICK, *arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.stderr
    assert word in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "cannot be read"),
        (["tiny"], "the model would be ignored"),
        (["--strategy", "full"], "--strategy would be ignored"),
        (["--no-share-layers"], "--share-layers would be ignored"),
    ],
)
def test_reading_takes_nothing_that_says_how_to_build(arguments: list[str], word: str) -> None:
    result = invoke("profile", "--read", "/no/such/file", *arguments)
    assert result.exit_code == 2, result.output
    assert word in " ".join(result.stderr.split())


def test_a_cache_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    """A folder misspelt looked like one that is empty."""
    (tmp_path / "file").write_text("")
    for name, word in (("file", "is a file"), ("nowhere", "is not there")):
        for flags in ([], ["--clear"]):
            result = invoke("cache", "--folder", str(tmp_path / name), *flags)
            assert result.exit_code == 2, result.output
            assert word in " ".join(result.stderr.split())


def _span_of_trace(name: str, file: str) -> None:
    with (
        span("dynamo", CONTAINER, co_name=name, co_filename=file, co_firstlineno=7),
        span("compile piece", "piece compiler", piece="piece_0"),
    ):
        pass


def test_pieces_of_several_traces_say_which_and_no_place_of_ours_is_given_for_the_readers_code() -> None:
    line = TimeLine()
    with listen(line):
        _span_of_trace("Decoder", forward.__file__)
        _span_of_trace("Layer", layer_runner.__file__)
        _span_of_trace("other", "/x/model.py")
    line.finish()
    labels = [row["label"] for row in rows_of(profile_of([line], {}))]
    traces = ["Decoder", "Layer", "other (model.py:7)"]
    assert labels == ["whole build", *traces, *(f"piece_0 of {one}" for one in traces)]


def test_the_pages_table_has_the_order_of_a_build_whatever_profile_has_a_phase() -> None:
    """What only the second one has stood after the unattributed."""
    first, second = small_profile(), small_profile()
    second = replace(second, phases_s={"cache load": 0.5, **second.phases_s})
    page = profile_page({"cold": first, "warm": second})
    found = re.search(r'"phases": (\[".*?\])', page)
    assert found is not None
    names = json.loads(found[1])
    assert names[-1] == "unattributed"
    assert names.index("cache load") < names.index("warm up")


def test_profiles_that_there_are_can_be_shown_together(tmp_path: Path) -> None:
    for name in ("before", "after"):
        (tmp_path / f"{name}.json").write_text(json.dumps(asdict(small_profile())))
    page = tmp_path / "page.html"
    files = [text for name in ("before", "after") for text in ("--read", str(tmp_path / f"{name}.json"))]
    result = invoke("profile", *files, "--html", str(page))
    assert result.exit_code == 0, result.output
    assert "before: ready after" in result.stdout
    assert '"name": "after"' in page.read_text()


@pytest.mark.slow
def test_cold_and_warm_are_two_fresh_processes(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    result = invoke("profile", *QUICK, "--cold-and-warm", "--json", str(path))
    assert result.exit_code == 0, result.output
    cold, warm = (read_profile(tmp_path / f"profile-{title}.json") for title in ("cold", "warm"))
    assert {piece.cache for piece in cold.pieces} == {"miss"}
    assert {piece.cache for piece in warm.pieces} == {"hit"}
    assert "aot autograd" in cold.phases_s
    assert "aot autograd" not in warm.phases_s
    assert min(cold.attributed_share, warm.attributed_share) >= 0.95


@pytest.mark.parametrize("strategy", ["fx", "fx_piecewise"])
def test_a_first_build_of_a_process_is_named(tmp_path: Path, strategy: str) -> None:
    """What Dynamo imports at its first compile is an import, also where no compiler of pieces is imported."""
    path = tmp_path / "profile.json"
    command = [sys.executable, "-P", "-m", "sgl_piecewise", "profile", *QUICK, "--strategy", strategy]
    subprocess.run([*command, "--json", str(path)], check=True, capture_output=True)
    assert read_profile(path).attributed_share >= 0.95


def test_the_pool_stands_beside_its_estimate() -> None:
    profile = small_profile()
    assert profile.memory is None
    estimate = PoolEstimate(reserved_bytes=3_000_000, largest_alone_bytes=2_000_000, is_upper_bound=True)
    memory = PoolReservation(reserved_bytes=4_000_000, largest_alone_bytes=3_500_000, estimate=estimate)
    found = replace(profile, memory=memory)
    assert profile_from_json(json.dumps(asdict(found))) == found
    assert summary(found)[-1] == (
        "graph pool: 4.00 MB reserved, 3.50 MB with the largest size alone; estimated at most 3.00 MB, 0.75 of it"
    )
    missing = replace(estimate, reserved_bytes=None, missing_because="it prints")
    without = replace(profile, memory=replace(memory, estimate=missing))
    assert summary(without)[-1].endswith("; no estimate: it prints")


def test_a_cache_folder_with_something_in_it_is_not_cold(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = invoke("profile", *QUICK, "--cold-and-warm", "--cache-folder", str(tmp_path))
    assert result.exit_code == 2
    assert "not empty" in " ".join(result.stderr.split())


def test_a_build_that_fails_in_its_own_process_says_why(tmp_path: Path) -> None:
    result = invoke("profile", "tiny", "--device", "cpu", "--capture-sizes", "99999", "--cold-and-warm")
    assert result.exit_code == 2
    assert "The cold build failed" in " ".join(result.stderr.split())


def test_the_cache_command_shows_and_clears(tmp_path: Path) -> None:
    result = invoke("cache", "--folder", str(tmp_path))
    assert result.exit_code == 0
    assert "0 pieces" in result.stdout
    piece = tmp_path / "compiled" / "environment" / "0123456789abcdef"
    piece.mkdir(parents=True)
    (piece / "artefact").write_bytes(b"x" * 2000)
    result = invoke("cache", "--folder", str(tmp_path))
    assert "1 piece, 2.00 KB" in " ".join(result.stdout.split())
    assert "0123456789ab" in result.stdout
    assert "unfinished" in result.stdout
    result = invoke("cache", "--folder", str(tmp_path), "--clear")
    assert "Deleted 1 piece" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_shares_are_of_the_whole() -> None:
    profile = replace(small_profile(), total_s=2.0, unattributed_s=0.5)
    assert profile.attributed_share == pytest.approx(0.75)


def test_a_comparison_can_be_profiled(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    result = invoke(
        "compare", *QUICK, "--strategies", "full,breakable", "--rounds", "1", "--profile", str(path)
    )
    assert result.exit_code == 0, result.output
    profile = read_profile(path)
    names = [one.name for one in profile.spans]
    assert {"build eager", "build full", "build breakable"} <= set(names)
    assert profile.attributed_share >= 0.9
