"""Which deployments of a suite are calibrated on the way, and how much of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from testbed.cli.calibrating import on_the_way, whole
from tests.support.scenarios import scenario

CPU: dict[str, Any] = {
    "cluster__gpu": "CPU",
    "model": {"type": "preset", "name": "tiny-qwen3"},
    "rollout__engine": {"weight_precision": "fp32", "max_total_num_tokens": 4096, "max_running_requests": 8},
}


def engines(n: int, path: str = "broadcast") -> Any:
    return scenario(
        **CPU,
        placement={"mode": "disaggregated", "rollout_num_gpus": n, "actor_num_gpus": 1},
        weights__path={"type": "fixed", "update_weight_transfer_mode": path},
    )


def test_the_first_deployment_of_each_size_is_measured_wholly_and_others_for_what_is_new() -> None:
    jobs = [
        (engines(1), Path(), "a"),
        (engines(1), Path(), "a"),  # served by the first
        (engines(1), Path(), "b"),  # other engines, nothing new
        (engines(2), Path(), "c"),
        (engines(1, "disk"), Path(), "d"),
        (engines(2), Path(), "c"),
    ]
    plans = on_the_way(jobs, 2)
    assert list(plans) == [0, 3, 4]
    assert plans[0].experiments and plans[0].updates and plans[0].beside and plans[0].controls
    assert not (plans[4].experiments or plans[4].updates or plans[4].beside or plans[4].controls)
    assert plans[4].short_run[1].weights.path.update_weight_transfer_mode == "disk"


def test_engines_side_by_side_measure_each_experiment_at_once() -> None:
    """Two measurements of each: one engine makes it twice, two once each, of three one more than needed."""
    one, two, three = (whole(engines(n), Path(), 2, True) for n in (1, 2, 3))
    assert len(one.experiments) == 2 * len(two.experiments) == 2 * len(three.experiments)
    assert not one.crowd and two.crowd and {e.requests for e in two.crowd} == {1, 8}
    assert len(one.updates) == 2 * len(two.updates)
    assert not whole(engines(1), Path(), 2, trainer=False).updates
