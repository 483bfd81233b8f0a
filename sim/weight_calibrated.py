"""Weight updates and phase switches as one machine's measurements have them, where the scenario names a profile.

The parts of a publication take what they took, and what further bytes add where the profile knows it. It refuses to
know how they were measured.
"""

from __future__ import annotations

from pathlib import Path

from msgspec import structs

from sim.costs.calibrated import read_profile
from sim.costs.errors import CostModelError
from sim.weight_paths import Prepared, WeightPaths
from testbed.calibration.profile import Profile, UpdateTimes
from testbed.core.events import PathCost
from testbed.scenario.catalogue import GpuSpec, ModelSpec
from testbed.scenario.layout import Layout
from testbed.scenario.run import CalibratedCosts
from testbed.scenario.scenario import Scenario

RELEASES_TRAINER = ("disk", "disk_delta")
"""Paths that need nothing of the trainer once the weights are prepared."""


def weight_paths(
    scenario: Scenario, layout: Layout, model: ModelSpec, gpu: GpuSpec, base_dir: Path | None = None
) -> WeightPaths:
    """The scenario's. Raises `CostModelError` if its profile has times of other paths only."""
    costs = scenario.simulation.engine_costs
    if isinstance(costs, CalibratedCosts):
        profile = read_profile((base_dir or Path()) / costs.profile)
        if profile.updates:
            return CalibratedPaths(scenario, layout, model, gpu, profile, costs.profile)
    return WeightPaths(scenario, layout, model, gpu)


class CalibratedPaths(WeightPaths):
    """Measured seconds in the place of formulas."""

    kind = "calibrated"

    def __init__(
        self, scenario: Scenario, layout: Layout, model: ModelSpec, gpu: GpuSpec, profile: Profile, path: str
    ) -> None:
        super().__init__(scenario, layout, model, gpu)
        self._profile = profile
        self._copied_by = ""
        choice = scenario.weights.path
        wanted = choice.among if choice.type == "cheapest" else (choice.update_weight_transfer_mode,)
        lacking = [p for p in wanted if p not in profile.updates]
        if lacking:
            raise CostModelError(
                f"the calibration profile {path} has no times of {', '.join(lacking)}, only of "
                f"{', '.join(profile.updates)}",
                "run `testbed calibrate` on a scenario with this path",
            )

    def _times(self, path: str) -> UpdateTimes:
        return self._profile.updates[path]

    def _size(self, path: str) -> float:
        """Bytes that travel."""
        return self.delta_bytes if path == "disk_delta" else self.payload_bytes

    def _taken(self, path: str) -> UpdateTimes:
        """Of the version that this scenario publishes."""
        t = self._times(path)
        more = self._size(path) - t.bytes
        return structs.replace(
            t,
            prepare_s=max(t.prepare_s + more * t.prepare_per_byte_s, 0.0),
            copy_s=max(t.copy_s + more * t.copy_per_byte_s, 0.0),
            requantize_s=max(t.requantize_s + more * t.requantize_per_byte_s, 0.0),
        )

    def prepare(self, now: float, path: str, participants: tuple[int, ...]) -> Prepared:
        ready = now + self._taken(path).prepare_s
        return Prepared(ready, ready if path in RELEASES_TRAINER else None, int(self._size(path)))

    def copy(self, now: float, path: str, participants: tuple[int, ...], engine: int) -> float:
        self._copied_by = path
        return now + self._taken(path).copy_s

    def requantize(self, now: float, engine: int) -> float:
        return now + self._taken(self._copied_by).requantize_s

    def pause_seconds(self, path: str, mode: str) -> float:
        control = self._profile.controls.get(mode)
        return self._times(path).pause_s if control is None else control.idle_s

    def resume_seconds(self, path: str) -> float:
        return self._times(path).resume_s

    def expected(self, path: str) -> PathCost:
        t = self._taken(path)
        return PathCost(path, t.prepare_s, t.copy_s, 0.0, t.requantize_s)

    def switch_seconds(self, to_phase: str) -> float:
        switch = self._profile.switch
        if switch is None:
            return super().switch_seconds(to_phase)
        return switch.train_s if to_phase == "train" else switch.generate_s
