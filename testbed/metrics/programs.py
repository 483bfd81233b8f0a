"""Programs against KV memory: what their contexts add up to, how many wait, and how many calls they make.

The sum of contexts over all programs that have begun, divided by all engines' KV, is what thrashing is made of: above
1 a cache that drops the least recently used keeps nothing that is used again. Areas since the last `take`. It refuses
to know who pauses programs and why.
"""

from __future__ import annotations

from collections import Counter

from testbed.core.actions import PauseProgram, RestoreProgram, Retire
from testbed.core.events import RunStarted, ToolFinished, TurnFinished
from testbed.metrics.fold import Handlers
from testbed.metrics.summary import ProgramFigures

_MEANS = ("context_share_mean", "programs_mean", "waiting_mean")


class ProgramFold:
    """Contexts in tokens; a program counts from the end of its first call to that of its last."""

    def __init__(self) -> None:
        self._context: dict[int, int] = {}
        self._waiting: set[int] = set()
        self._total = 0
        self._slots = 0
        self._t = 0.0
        self._areas = dict.fromkeys(_MEANS, 0.0)
        self._largest = 0.0
        self._turns = self._pauses = 0
        self._faults: Counter[str] = Counter()
        self.handlers: Handlers = {
            TurnFinished: self._turn_finished,
            ToolFinished: self._tool_finished,
            Retire: self._retire,
            PauseProgram: self._pause,
            RestoreProgram: self._restore,
            RunStarted: self._run_started,
        }

    @property
    def _share(self) -> float:
        return self._total / self._slots if self._slots else 0.0

    def _settle(self, t: float) -> None:
        seconds, self._t = t - self._t, t
        if seconds > 0:
            share = self._share
            self._largest = max(self._largest, share)
            self._areas["context_share_mean"] += seconds * share
            self._areas["programs_mean"] += seconds * len(self._context)
            self._areas["waiting_mean"] += seconds * len(self._waiting)

    def _set(self, t: float, trajectory: int, tokens: int) -> None:
        self._settle(t)
        self._total += tokens - self._context.get(trajectory, 0)
        self._context[trajectory] = tokens

    def _turn_finished(self, t: float, e: TurnFinished) -> None:
        self._turns += e.finish_reason != "abort"
        if e.continues:
            self._set(t, e.trajectory, e.prompt_tokens + e.output_tokens)
        else:
            self._ends(t, e.trajectory)

    def _tool_finished(self, t: float, e: ToolFinished) -> None:
        if e.fault:
            self._faults[e.fault] += 1
        if e.trajectory in self._context:
            self._set(t, e.trajectory, self._context[e.trajectory] + e.observation_tokens)

    def _retire(self, t: float, a: Retire) -> None:
        for trajectory in a.trajectories:
            self._ends(t, trajectory)

    def _ends(self, t: float, trajectory: int) -> None:
        self._settle(t)
        self._total -= self._context.pop(trajectory, 0)
        self._waiting.discard(trajectory)

    def _pause(self, t: float, a: PauseProgram) -> None:
        self._settle(t)
        self._pauses += 1
        self._waiting.add(a.trajectory)

    def _restore(self, t: float, a: RestoreProgram) -> None:
        self._settle(t)
        self._waiting.discard(a.trajectory)

    def _run_started(self, t: float, e: RunStarted) -> None:
        self._slots = sum(e.kv_tokens)

    def take(self, t: float) -> ProgramFigures:
        """Areas (value x seconds) and counts since the last call."""
        self._settle(t)
        taken = ProgramFigures(
            self._turns,
            self._pauses,
            context_share_max=self._largest,
            tool_faults=dict(self._faults),
            **self._areas,
        )
        self._turns = self._pauses = 0
        self._faults.clear()
        self._areas = dict.fromkeys(_MEANS, 0.0)
        self._largest = self._share
        return taken


def added(total: ProgramFigures, part: ProgramFigures) -> ProgramFigures:
    """Counts and areas summed, the largest of both."""
    return ProgramFigures(
        total.turns + part.turns,
        total.pauses + part.pauses,
        total.context_share_mean + part.context_share_mean,
        max(total.context_share_max, part.context_share_max),
        total.programs_mean + part.programs_mean,
        total.waiting_mean + part.waiting_mean,
        tool_faults=dict(Counter(total.tool_faults) + Counter(part.tool_faults)),
    )


def mean_figures(total: ProgramFigures, seconds: float) -> ProgramFigures:
    """Areas divided by the time that they cover."""
    if not seconds:
        return ProgramFigures()
    return ProgramFigures(
        total.turns,
        total.pauses,
        total.context_share_mean / seconds,
        total.context_share_max,
        total.programs_mean / seconds,
        total.waiting_mean / seconds,
        60.0 * total.turns / seconds,
        dict(total.tool_faults),
    )
