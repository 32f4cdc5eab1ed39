"""Records: plain facts, and a clock whose phases add up."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest

from sgl_piecewise.runtime.records import BuildRecord, PhaseClock, SizeBuild


def build_record(**changes: object) -> BuildRecord:
    size = SizeBuild(
        size=16,
        warm_up_s=0.1,
        capture_s=0.2,
        num_graph_segments=3,
        num_breaks=2,
        reserved_bytes=1024,
        driver_bytes=None,
    )
    record = BuildRecord(
        strategy="breakable",
        device="emulated",
        is_emulated=True,
        segments_launched=True,
        total_s=1.0,
        phases_s={"warm_up": 0.25, "capture": 0.5},
        sizes=(size,),
    )
    return dataclasses.replace(record, **changes)  # type: ignore[arg-type]


def test_time_in_no_phase_is_shown_as_such() -> None:
    assert build_record().unattributed_s == pytest.approx(0.25)


def test_unattributed_time_is_never_negative() -> None:
    """Two clocks read at different moments may disagree by a little."""
    assert build_record(total_s=0.7).unattributed_s == 0.0


def test_a_record_is_json_and_cannot_be_changed() -> None:
    record = build_record()
    assert json.loads(json.dumps(dataclasses.asdict(record)))["sizes"][0]["num_breaks"] == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.total_s = 0.0  # type: ignore[misc]


def test_phases_of_one_name_add_up_and_stay_below_the_total() -> None:
    clock = PhaseClock()
    for _ in range(2):
        with clock.phase("capture"):
            time.sleep(0.01)
    with pytest.raises(KeyError), clock.phase("warm_up"):
        raise KeyError
    assert list(clock.phases_s) == ["capture", "warm_up"]
    assert 0.02 <= clock.phases_s["capture"] <= clock.total_s()
