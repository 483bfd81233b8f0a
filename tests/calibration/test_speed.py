"""How fast a machine was around a run: what loops say of it, and what it does to a profile and to a validation."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from testbed.calibration.design import Traffic, TrafficPoint
from testbed.calibration.phases import Phases, TrainPoint
from testbed.calibration.profile import (
    ArrivalFit,
    BesideFit,
    ControlTimes,
    CrowdFit,
    DecodeFit,
    FitRanges,
    PrefillFit,
    Profile,
    Section,
    SwitchTimes,
    TrainerFit,
    UpdateTimes,
)
from testbed.calibration.speed import MachineSpeed, Probe, around, at_speed, longer, read_speed, times, write_speed
from testbed.run_files import SPEED

LOOP = Traffic(1, ((4, 2), (5, 3)))
PROFILE = Profile(
    format=1,
    decode=DecodeFit(0.01, 0.001, 1e-6, (Section(4.0, 0.0005),)),
    prefill=PrefillFit(0.02, 2e-4, 3e-7, 1e-3, padded=True),
    ranges=FitRanges(batch=(1, 16)),
    max_total_num_tokens=512,
    arrival=ArrivalFit(0.005, 0.0005),
    trainer=TrainerFit(0.1, 0.01, 1e-4, 1e-7, tokens=(64, 2048)),
    updates={"broadcast": UpdateTimes(0.1, 0.01, 0.2, 0.03, 0.004, 2, 1000, 1e-6, 2e-6, 3e-6)},
    switch=SwitchTimes(0.4, 0.5),
    beside=BesideFit(1.1, 1.2, 1.3),
    traffic_s=0.004,
    probe_s=0.3,
    crowd=CrowdFit(0.002, 0.0001, 1.15),
    controls={"abort": ControlTimes(0.001, 0.002, 16, 0.003, 0.004)},
    start_s=30.0,
)


def points(*seconds: float, loop: Traffic = LOOP) -> list[TrafficPoint]:
    return [TrafficPoint(loop, s) for s in seconds]


def test_loops_compare_by_their_medians_if_they_are_the_same_loops() -> None:
    assert longer(points(2.2, 9.0, 2.0), points(2.0)) == pytest.approx(1.1)
    assert longer([], points(2.0)) == longer(points(2.0), []) == 1.0
    assert longer(points(9.0, loop=Traffic(2, LOOP.lengths)), points(2.0)) == 1.0


def test_a_slower_machine_takes_longer_for_everything_that_takes_time_and_for_nothing_else() -> None:
    slow = at_speed(PROFILE, 1.5)
    assert slow.decode == DecodeFit(0.015, 0.0015, 1.5e-6, (Section(4.0, 0.00075),))
    assert structs.astuple(slow.prefill) == pytest.approx((0.03, 3e-4, 4.5e-7, 1.5e-3, True))
    assert structs.astuple(slow.arrival) == pytest.approx((0.0075, 0.00075))
    assert structs.astuple(slow.trainer)[:4] == pytest.approx((0.15, 0.015, 1.5e-4, 1.5e-7))
    u = slow.updates["broadcast"]
    assert structs.astuple(u) == pytest.approx((0.15, 0.015, 0.3, 0.045, 0.006, 2, 1000, 1.5e-6, 3e-6, 4.5e-6))
    assert structs.astuple(slow.switch) == pytest.approx((0.6, 0.75))
    assert structs.astuple(slow.controls["abort"]) == pytest.approx((0.0015, 0.003, 16, 0.0045, 0.006))
    assert slow.crowd is not None and structs.astuple(slow.crowd) == pytest.approx((0.003, 0.00015, 1.15))
    assert slow.traffic_s == pytest.approx(0.006)
    own = at_speed(PROFILE, 1.5, trainer=2.0)
    assert own.decode == slow.decode and structs.astuple(own.trainer)[:2] == pytest.approx((0.2, 0.02))
    for same in ("ranges", "beside", "probe_s", "max_total_num_tokens", "start_s"):
        assert getattr(slow, same) == getattr(PROFILE, same)
    assert slow.trainer is not None and slow.trainer.tokens == (64, 2048)
    assert at_speed(structs.replace(PROFILE, arrival=None, trainer=None, switch=None), 2.0).trainer is None


def test_what_a_journal_says_comes_to_another_speed_whole() -> None:
    phases = Phases(1024, 1, [TrainPoint((8, 9), 2.0)], {"broadcast": {"copy_s": [(7, 0.5)]}}, {"train": [1.0]})
    slow = phases.times(1.5)
    assert slow.train == [TrainPoint((8, 9), 3.0)] and slow.switches == {"train": [1.5]}
    assert slow.updates == {"broadcast": {"copy_s": [(7, 0.75)]}}
    assert times(TrainPoint((8, 9), 2.0), 2.0) == TrainPoint((8, 9), 4.0)


def test_two_loops_on_each_side_of_a_run_where_they_are_there() -> None:
    """Four runs, five loops: 0 | 1 | 2 | 3 | 4."""
    probes = [Probe(points(float(i))) for i in range(5)]
    of = [around(probes, run) for run in range(4)]
    assert [[int(one.loop[0].seconds) for one in s.before] for s in of] == [[0], [0, 1], [1, 2], [2, 3]]
    assert [[int(one.loop[0].seconds) for one in s.after] for s in of] == [[1, 2], [2, 3], [3, 4], [4]]


def test_the_speed_of_a_run_lies_beside_its_journal(tmp_path: Path) -> None:
    assert read_speed(tmp_path) is None
    speed = MachineSpeed([Probe(points(1.0))], [Probe(points(3.0), 0.5), Probe(points(2.0))])
    write_speed(tmp_path, speed)
    assert read_speed(tmp_path) == speed
    (tmp_path / SPEED).write_text("[]")
    with pytest.raises(ValueError, match=SPEED):
        read_speed(tmp_path)
