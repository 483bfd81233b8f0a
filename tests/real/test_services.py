"""What a real run's services do for trajectories that end in the same moment, and for environments that are released
at any moment of their life."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from real.environments.base import RealTask, ToolCall
from real.services import Services
from real.slots import Places
from real.store import ExperienceStore
from real.trainer.trainer import StepStats
from testbed.core import actions as do
from testbed.core import events as said
from tests.real.test_store import answered
from tests.support.scenarios import scenario

TASK = RealTask(0, (5, 6, 7), (), 16, True, 0, None)


class Surroundings:
    """Environment and trainer that answer after some turns of the loop, and remember what was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.alive: set[tuple[int, int]] = set()
        self.most_alive = self.prepared = 0

    async def _answer(self, name: str) -> None:
        self.asked.append(name)
        for _ in range(3):
            await asyncio.sleep(0)

    async def prepare(self, task: RealTask, who: tuple[int, int]) -> None:
        assert who not in self.alive, "prepared once"
        self.alive.add(who)
        self.prepared += 1
        self.most_alive = max(self.most_alive, len(self.alive))
        await self._answer("prepare")

    async def release_member(self, task: RealTask, who: tuple[int, int]) -> None:
        await self._answer("release")
        self.alive.remove(who)

    async def run_tool(self, task: RealTask, who: tuple[int, int], call: ToolCall) -> list[int]:
        await self._answer("tool")
        return [9]

    def tool_fault(self, task: RealTask, who: tuple[int, int]) -> str:
        return ""

    async def reward(self, *args: Any) -> float:
        await self._answer("reward")
        return 1.0

    def release(self, index: int) -> None:
        pass

    async def log_probs(self, records: list[Any], model: str) -> list[Any]:
        await self._answer(model)
        return [np.zeros(r.loss_mask.size, np.float32) for r in records]

    async def values(self, records: list[Any]) -> list[Any]:
        await self._answer("values")
        return [np.zeros(r.loss_mask.size, np.float32) for r in records]

    async def teacher_log_probs(self, records: list[Any], names: list[str]) -> list[Any]:
        await self._answer("teacher")
        return [{"teacher_log_probs": np.zeros(r.loss_mask.size, np.float32)} for r in records]

    async def train_update(self, records: list[Any], batch: int, update: int, updates: int) -> StepStats:
        await self._answer("train")
        return StepStats.__new__(StepStats)


class Bench:
    """Services with everything around them on one loop; what they said, and the errors of their tasks."""

    def __init__(self, **changes: Any) -> None:
        self.around, self.said, self.tasks = Surroundings(), list[said.Event](), list[asyncio.Task[Any]]()
        self.store = ExperienceStore(self.around)  # type: ignore[arg-type]
        self.services = Services(
            scenario(**changes),
            self.store,
            self.around,  # type: ignore[arg-type]
            self.around,  # type: ignore[arg-type]
            lambda task: "teacher",
            self.said.append,
            self._spawn,
            lambda: 0.0,
            self._before_step,
            lambda *args: None,
        )
        self.store.add_task(TASK)

    async def _before_step(self, batch: int) -> None:
        await asyncio.sleep(0)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        self.tasks.append(asyncio.get_running_loop().create_task(work))
        return self.tasks[-1]

    def answered(self, trajectory: int) -> None:
        c = self.store.open(trajectory, 0, 0, trajectory, 2)
        answered(c, [10, 11], (0, 0, 2))
        c.call = ToolCall(0, "1 + 1")

    def retire(self, *trajectories: int) -> None:
        self.services.retire(do.Retire(trajectories, 0, "aborted", "over_sampled", 2))


def experience(trajectory: int) -> Any:
    """Of which the services read two fields."""
    return type("Experience", (), {"trajectory": trajectory, "masked_tokens": 0, "reward": 0.0, "output_tokens": 2})()


ACTIONS: dict[str, Callable[[Services], None]] = {
    "reward": lambda s: s.compute_signals(do.ComputeSignals("reward", (0,), -1)),
    "teacher": lambda s: s.compute_signals(do.ComputeSignals("teacher", (0,), -1)),
    "old log-probs": lambda s: s.compute_signals(do.ComputeSignals("old_log_probs", (0,), 0)),
    "reference": lambda s: s.compute_signals(do.ComputeSignals("reference", (0,), 0)),
    "critic": lambda s: s.compute_signals(do.ComputeSignals("critic", (0,), 0)),
    "tool": lambda s: s.run_tool(do.RunTool(0, 0)),
    "train": lambda s: s.train(do.Train(0, 0, 1, (experience(0),), "test")),
}
"""Everything that is asked about a trajectory."""

TOLD_ANYHOW = {"teacher", "old log-probs", "reference", "critic", "train"}
"""Jobs of several trajectories: the core hears of their end and passes over those that are gone."""


@pytest.mark.parametrize("name", ACTIONS)
@pytest.mark.parametrize("turns", range(6))
def test_a_trajectory_may_end_at_any_moment_of_what_was_asked_about_it(name: str, turns: int) -> None:
    """`turns` of the event loop after the action, 0 being the same moment: another event ended its group."""

    async def go() -> Bench:
        bench = Bench()
        bench.answered(0)
        ACTIONS[name](bench.services)
        for _ in range(turns):
            await asyncio.sleep(0)
        told = len(bench.said)
        bench.retire(0)
        await asyncio.gather(*bench.tasks)
        if name not in TOLD_ANYHOW:
            assert len(bench.said) == told, "nothing is said about what is over"
        return bench

    bench = asyncio.run(go())
    assert bench.around.asked, "what was asked is done to the end"
    assert bench.store.find(0) is None


def test_what_was_asked_is_told() -> None:
    """The same without an end: that the test above can fail."""

    async def go(name: str) -> list[said.Event]:
        bench = Bench()
        bench.answered(0)
        ACTIONS[name](bench.services)
        await asyncio.gather(*bench.tasks)
        return bench.said

    kinds = {name: [type(e).__name__ for e in asyncio.run(go(name))] for name in ACTIONS}
    assert kinds == {
        name: [{"tool": "ToolFinished", "train": "TrainStepFinished"}.get(name, "SignalReady")] for name in ACTIONS
    }


@pytest.mark.parametrize("turns", range(8))
def test_ap_03_an_environment_released_at_any_moment_is_reclaimed_and_its_place_free(turns: int) -> None:
    async def go() -> Bench:
        bench = Bench(workload__tools={"environments": 1})
        for t in (0, 1):
            bench.services.prepare_environment(do.PrepareEnvironment(t, 0, 0, t))
        for _ in range(turns):
            await asyncio.sleep(0)
        for t in (0, 1):
            told = len(bench.said)
            bench.services.release_environment(do.ReleaseEnvironment(t))
            bench.retire(t)
            await asyncio.sleep(0)
            assert not any(isinstance(e, said.EnvironmentReady) and e.trajectory == t for e in bench.said[told:])
        bench.store.add_task(TASK)
        bench.services.prepare_environment(do.PrepareEnvironment(2, 1, 0, 0))
        for _ in range(30):
            await asyncio.sleep(0)
        assert said.EnvironmentReady(0.0, 2) in bench.said, "the place is free again"
        bench.services.release_environment(do.ReleaseEnvironment(2))
        await asyncio.gather(*bench.tasks)
        return bench

    bench = asyncio.run(go())
    assert not bench.around.alive and bench.around.most_alive == 1
    assert bench.around.asked.count("prepare") == bench.around.asked.count("release")


@given(
    n=st.integers(0, 3),
    steps=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=24),
)
def test_ap_03_places_in_any_order_of_requests_and_releases(n: int, steps: list[tuple[int, int]]) -> None:
    """Never more than `n` environments alive, each that was asked for and released is gone in the end, and one that was
    not released is ready once."""

    async def go() -> None:
        around = Surroundings()
        places = Places(around, n)  # type: ignore[arg-type]
        tasks: list[asyncio.Task[None]] = []
        ready: list[int] = []
        open_: set[int] = set()
        serial = 0
        for key, wait in steps:
            if key in open_:
                places.release((key + 6 * serial_of[key], 0))
                open_.remove(key)
            else:
                serial += 1
                serial_of[key] = serial
                name = key + 6 * serial
                work = places.prepare(TASK, (name, 0), lambda name=name: ready.append(name))  # type: ignore[misc]
                tasks.append(asyncio.create_task(work))
                open_.add(key)
            for _ in range(wait):
                await asyncio.sleep(0)
        for key in open_:
            places.release((key + 6 * serial_of[key], 0))
        await asyncio.gather(*tasks)
        assert not around.alive and len(ready) == len(set(ready)) <= around.prepared
        assert not n or around.most_alive <= n

    serial_of: dict[int, int] = {}
    asyncio.run(go())
    with pytest.raises(KeyError):
        Places(Surroundings()).release((0, 0))  # type: ignore[arg-type]
