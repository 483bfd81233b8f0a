"""A backend made of constants: every action takes the seconds that the test says, on a heap of (time, order).

It carries out, it never decides; tests override single durations or whole replies. What happened is in `log`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

from testbed.core import actions as do
from testbed.core import events as said
from testbed.core.core import Core
from testbed.scenario import Scenario

KEPT = 7
"""Tokens of a turn that was taken back and keeps them."""


class Scripted:
    """`seconds` by name: train, prepare, pause, resume, switch, signal, tool, environment."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        turn: Callable[[do.StartTurn], float] | float = 10.0,
        copy: Callable[[do.CopyWeights], float] | float = 1.0,
        requantize: Callable[[do.RequantizeWeights], float] | float = 0.0,
        reward: Callable[[do.ComputeSignals], float] | float = 1.0,
        values: Callable[[int], float] = lambda trajectory: float(trajectory % 2),
        turns: int = 1,
        tasks: int | None = None,
        environments: bool = False,
        kv_tokens: int = 10_000,
        **seconds: float,
    ) -> None:
        self.core = Core(scenario)
        self.scenario = scenario
        self.seconds: dict[str, float] = {
            "train": 5.0,
            "prepare": 0.0,
            "pause": 0.0,
            "resume": 0.0,
            "switch": 2.0,
            "signal": 1.0,
            "tool": 3.0,
            "environment": 0.0,
            **seconds,
        }
        self._turn, self._copy, self._requantize, self._reward, self._values = turn, copy, requantize, reward, values
        self._turns, self._tasks, self._environments = turns, tasks, environments
        self._heap: list[tuple[float, int, Any]] = []
        self._order = count()
        self.now = 0.0
        self.log: list[tuple[float, said.Event | do.Action]] = []
        self.records: list[tuple[said.Event, list[do.Action]]] = []
        self.version: dict[int, int] = {e.index: 0 for e in self.core.layout.engines}
        self._drawn = 0
        self._kv_tokens = kv_tokens
        self._live: dict[int, tuple[do.StartTurn, float, int]] = {}
        self._spans: dict[int, list[tuple[int, float]]] = {}
        self._paused: dict[int, str] = {}
        self._copies: dict[int, set[int]] = {}
        self.tokens = 50
        self.fails: Callable[[do.Action], bool] = lambda action: False
        """Whether this step of a weight update ends in `WeightUpdateFailed` instead of its answer."""
        self.drops: Callable[[do.Action], bool] = lambda action: False
        """Whether this step of a weight update is never answered (a hung engine)."""
        self.turn_fails: Callable[[do.StartTurn], bool] = lambda action: False
        """Whether this turn is lost half-way (and nobody asked for it)."""
        self.tool_fails: Callable[[do.RunTool], bool] = lambda action: False
        self.early_release = False
        """The trainer is released with the preparation (a snapshot), not with the last copy (a collective)."""

    # --- running ------------------------------------------------------------------------------------------------------

    def at(self, t: float, make: Callable[[float], said.Event | None]) -> None:
        heapq.heappush(self._heap, (t, next(self._order), make))

    def tell(self, event: said.Event) -> list[do.Action]:
        self.log.append((event.t, event))
        actions = self.core.handle(event)
        self.records.append((event, actions))
        for action in actions:
            self.log.append((event.t, action))
            self.carry_out(action)
        return actions

    def run(self, until: float = float("inf"), max_events: int = 200_000) -> Scripted:
        if not self.records:
            self.tell(said.RunStarted(0.0, kv_tokens=(self._kv_tokens,) * len(self.version)))
        for _ in range(max_events):
            if not self._heap or self._heap[0][0] > until or self.core.finished:
                return self
            self.now, _, make = heapq.heappop(self._heap)
            event = make(self.now)
            if event is not None:
                self.tell(event)
        raise AssertionError("the run does not end: " + self.core.explain())

    # --- what goes wrong ----------------------------------------------------------------------------------------------

    def lose(self, t: float, engine: int) -> None:
        """The engine dies: its turns end without a word; steps of an update under way may still be reported."""

        def lost(now: float) -> said.Event:
            for trajectory, (turn, _, _) in list(self._live.items()):
                if turn.engine == engine:
                    del self._live[trajectory]
            return said.EngineLost(now, engine)

        self.at(t, lost)

    def join(self, t: float, engine: int, version: int = 0) -> None:
        """The engine is back, with these weights (ignored if it was not lost)."""

        def joined(now: float) -> said.Event | None:
            if self.core.context.engines[engine].state != "lost":
                return None
            self.version[engine] = version
            return said.EngineJoined(now, engine, version)

        self.at(t, joined)

    def _answer(self, seconds: float, action: Any, stage: str, make: Callable[[float], said.Event | None]) -> None:
        """`make` after these seconds, or the failure that the test asks for, or silence."""
        if self.drops(action):
            return
        if self.fails(action):
            engine = getattr(action, "engine", -1)
            self.at(
                self.now + seconds, lambda t: said.WeightUpdateFailed(t, engine, action.version, stage, "as scripted")
            )
            return
        self.at(self.now + seconds, make)

    def of(self, *kinds: type) -> list[tuple[float, Any]]:
        return [(t, x) for t, x in self.log if isinstance(x, kinds)]

    # --- carrying out -------------------------------------------------------------------------------------------------

    def carry_out(self, action: do.Action) -> None:
        handler = getattr(self, "_on_" + type(action).__name__, None)
        if handler is not None:
            handler(action)

    def _on_DrawTask(self, a: do.DrawTask) -> None:
        if a.task < 0 and self._tasks is not None and self._drawn >= self._tasks:
            self.at(self.now, lambda t: said.TasksExhausted(t, a.group))
            return
        task = a.task if a.task >= 0 else self._drawn
        self._drawn += a.task < 0
        self.at(self.now, lambda t: said.TaskArrived(t, a.group, task, 100, environment=self._environments))

    def _on_StartTurn(self, a: do.StartTurn) -> None:
        seconds = self._turn(a) if callable(self._turn) else self._turn
        serial = next(self._order)
        self._live[a.trajectory] = (a, self.now, serial)
        self._spans[a.trajectory] = [(self.version[a.engine], self.now)]
        if self.turn_fails(a):
            self.at(self.now + seconds / 2, lambda t: self._lost_turn(t, a, serial))
            return
        self._end_turn(a, seconds, serial)

    def _lost_turn(self, t: float, a: do.StartTurn, serial: int) -> said.Event | None:
        live = self._live.get(a.trajectory)
        if live is None or live[2] != serial:
            return None
        del self._live[a.trajectory]
        return said.TurnFailed(t, a.trajectory, a.turn, a.engine, "refused", 3)

    def _end_turn(self, a: do.StartTurn, seconds: float, serial: int) -> None:
        start = self.now

        def finish(t: float) -> said.Event | None:
            live = self._live.get(a.trajectory)
            if live is None or live[2] != serial:
                return None
            del self._live[a.trajectory]
            return said.TurnFinished(
                t,
                a.trajectory,
                a.turn,
                a.engine,
                100,
                self.tokens,
                self._cut(a.trajectory, start, t),
                0,
                start,
                start,
                "stop",
                continues=a.turn + 1 < self._turns,
            )

        self.at(self.now + seconds, finish)

    def _cut(self, trajectory: int, start: float, end: float) -> tuple[said.Span, ...]:
        """Version spans in proportion to time."""
        marks = self._spans.pop(trajectory)
        edges = [round(self.tokens * (t - start) / (end - start)) if end > start else 0 for _, t in marks]
        edges.append(self.tokens)
        edges[0] = 0
        return tuple((v, edges[i], edges[i + 1]) for i, (v, _) in enumerate(marks) if edges[i + 1] > edges[i])

    def _fail_turn(self, trajectory: int, reason: str) -> None:
        live = self._live.pop(trajectory, None)
        if live is not None:
            a = live[0]
            self.at(self.now, lambda t: said.TurnFailed(t, a.trajectory, a.turn, a.engine, reason, 7))

    def _on_AbortTurn(self, a: do.AbortTurn) -> None:
        live = self._live.get(a.trajectory)
        if not a.keep or live is None or self.now == live[1]:
            self._fail_turn(a.trajectory, "aborted")
            return
        del self._live[a.trajectory]
        spans = ((self._spans.pop(a.trajectory)[0][0], 0, KEPT),)
        began = live[1]
        self.at(
            self.now,
            lambda t: said.TurnFinished(
                t, a.trajectory, a.turn, a.engine, 100, KEPT, spans, 0, began, began, "abort", continues=True
            ),
        )

    def _on_RunTool(self, a: do.RunTool) -> None:
        self.at(self.now + self.seconds["tool"], lambda t: said.ToolFinished(t, a.trajectory, 20, self.tool_fails(a)))

    def _on_PrepareEnvironment(self, a: do.PrepareEnvironment) -> None:
        self.at(self.now + self.seconds["environment"], lambda t: said.EnvironmentReady(t, a.trajectory))

    def _on_ComputeSignals(self, a: do.ComputeSignals) -> None:
        if a.pool >= 0 or a.signal != "reward":
            self.at(self.now + self.seconds["signal"], lambda t: said.SignalReady(t, a.signal, a.trajectories))
            return
        seconds = self._reward(a) if callable(self._reward) else self._reward
        values = tuple(self._values(i) for i in a.trajectories)
        self.at(self.now + seconds, lambda t: said.SignalReady(t, a.signal, a.trajectories, values))

    def _on_Train(self, a: do.Train) -> None:
        for update in range(a.updates):
            at = self.now + self.seconds["train"] * (update + 1)
            self.at(at, lambda t, u=update: said.TrainStepFinished(t, a.batch, u))

    def _on_PrepareWeights(self, a: do.PrepareWeights) -> None:
        self._copies[a.version] = set(a.participants)
        if self.early_release:
            del self._copies[a.version]
            self.at(self.now, lambda t: said.TrainerReleased(t, a.version))
        self._answer(self.seconds["prepare"], a, "prepare", lambda t: said.WeightsPrepared(t, a.version))

    def _on_PauseEngine(self, a: do.PauseEngine) -> None:
        if a.mode == "abort":
            for trajectory, (turn, _, _) in list(self._live.items()):
                if turn.engine == a.engine:
                    self._fail_turn(trajectory, "aborted")
        self._answer(self.seconds["pause"], a, "pause", lambda t: said.EnginePaused(t, a.engine))

    def _on_CopyWeights(self, a: do.CopyWeights) -> None:
        seconds = self._copy(a) if callable(self._copy) else self._copy

        def copied(t: float) -> said.Event:
            left = self._copies.get(a.version)
            if left is not None:
                left.discard(a.engine)
                if not left:
                    del self._copies[a.version]
                    self.at(t, lambda u: said.TrainerReleased(u, a.version))
            return said.WeightsCopied(t, a.engine, a.version)

        self._answer(seconds, a, "copy", copied)

    def _on_RequantizeWeights(self, a: do.RequantizeWeights) -> None:
        seconds = self._requantize(a) if callable(self._requantize) else self._requantize
        self._answer(seconds, a, "requantize", lambda t: said.EngineReady(t, a.engine, a.version))

    def _on_ResumeEngine(self, a: do.ResumeEngine) -> None:
        def resumed(t: float) -> said.Event | None:
            if self.core.context.engines[a.engine].state == "lost":
                return None
            if self.version[a.engine] != a.version:
                self.version[a.engine] = a.version
                for trajectory, (turn, _, _) in self._live.items():
                    if turn.engine == a.engine:
                        self._spans[trajectory].append((a.version, t))
            return said.EngineResumed(t, a.engine, a.version)

        if not self.drops(a):
            self.at(self.now + self.seconds["resume"], resumed)

    def _on_SwitchPool(self, a: do.SwitchPool) -> None:
        self.at(self.now + self.seconds["switch"], lambda t: said.PoolSwitched(t, a.pool, a.phase))

    def _on_SetTimer(self, a: do.SetTimer) -> None:
        self.at(a.at, lambda t: said.TimerFired(t, a.timer))


def names(items: Iterable[tuple[float, Any]]) -> list[str]:
    return [type(x).__name__ for _, x in items]
