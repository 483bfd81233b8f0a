"""Which trajectories a tail rule trains, gives up or delays: by how long their reply would have been, and by how hard
their task is.

Early stops and redundant members favour what ends soon. What was given up has no length of its own, so lengths and
difficulty are those of the plan; only where plans are known (simulated runs, and real ones that carry plans out) can
the bias be told. The whole run counts, without what its end cut off. It refuses to know which rule was at work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from testbed.core.actions import Retire, StartTurn, Train
from testbed.core.events import TrainStepFinished
from testbed.metrics.fold import Handlers
from testbed.metrics.summary import BiasBin
from testbed.scenario.rollout import FifoTurns, OverSampling
from testbed.scenario.scenario import Scenario

PlanOf = Callable[[int], Sequence[tuple[int, float]]]
"""Task -> (output tokens, reward) of each member. The task is alive when it is asked."""

HARDER = 0.25
"""Width of the bins of difficulty (mean reward of the task's members)."""


def has_tail_rule(scenario: Scenario) -> bool:
    """Whether trajectories are treated by their length."""
    r = scenario.rollout
    return isinstance(r.admission, OverSampling) or r.redundant_members > 0 or not isinstance(r.turn_order, FifoTurns)


class _Cell:
    __slots__ = ("delay_s", "delay_steps", "given_up", "trained")

    def __init__(self) -> None:
        self.trained = self.given_up = 0
        self.delay_s = self.delay_steps = 0.0


class BiasFold:
    """Trajectories that began a model call, by bin."""

    def __init__(self, plan_of: PlanOf) -> None:
        self._plan_of = plan_of
        self._of: dict[int, tuple[int, int]] = {}
        """Live trajectory -> (task, member)."""
        self._first: dict[int, tuple[float, int]] = {}
        """Task -> (time, batches trained) of its first call: a task that comes again has waited since then."""
        self._steps = 0
        self._cells: dict[tuple[str, float], _Cell] = {}
        self.handlers: Handlers = {
            StartTurn: self._start_turn,
            Retire: self._retire,
            Train: self._train,
            TrainStepFinished: self._train_step,
        }

    def _start_turn(self, t: float, a: StartTurn) -> None:
        if a.trajectory not in self._of:
            self._of[a.trajectory] = (a.task, a.member)
            self._first.setdefault(a.task, (t, self._steps))

    def _train_step(self, t: float, e: TrainStepFinished) -> None:
        if not e.update:
            self._steps += 1

    def _train(self, t: float, a: Train) -> None:
        """Delays are read when the batch is taken."""
        for x in a.experiences:
            if x.use == 0 and x.task in self._first:
                since, steps = self._first[x.task]
                for cell in self._cells_of(x.trajectory):
                    cell.trained += 1
                    cell.delay_s += t - since
                    cell.delay_steps += self._steps - steps
        for task in {x.task for x in a.experiences}:
            self._first.pop(task, None)

    def _retire(self, t: float, a: Retire) -> None:
        for trajectory in a.trajectories:
            if a.outcome != "trained" and a.reason != "run_ended":
                for cell in self._cells_of(trajectory):
                    cell.given_up += 1
            self._of.pop(trajectory, None)

    def _cells_of(self, trajectory: int) -> list[_Cell]:
        """Of its length and of its task's difficulty; none if it never began."""
        found = self._of.get(trajectory)
        if found is None:
            return []
        task, member = found
        plans = self._plan_of(task)
        reward = sum([r for _, r in plans]) / len(plans)
        length = float(1 << max(plans[member][0], 1).bit_length() - 1)
        keys = (("length", length), ("difficulty", min(reward // HARDER * HARDER, 1 - HARDER)))
        return [self._cells.setdefault(key, _Cell()) for key in keys]

    def bins(self) -> list[BiasBin]:
        """By kind and rising: lengths in powers of two, difficulty in quarters of the success rate."""
        out = []
        for (by, low), c in sorted(self._cells.items()):
            high = 2 * low if by == "length" else low + HARDER
            n = max(c.trained, 1)
            out.append(BiasBin(by, low, high, c.trained, c.given_up, c.delay_s / n, c.delay_steps / n))
        return out
