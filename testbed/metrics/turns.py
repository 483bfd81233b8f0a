"""Every turn of a run with its timeline: sent, first worked on, first token, end. A fold that keeps all turns.

For comparing runs turn by turn; the figures of a run alone stream. It refuses to know backends and files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from testbed.core.actions import Action, StartTurn
from testbed.core.events import Event, TurnFinished


class Turn(Struct, frozen=True):
    """One model call that ended with an answer. Times in seconds since the start of its run."""

    task: int
    member: int
    turn: int
    engine: int
    sent_t: float
    """The core asked for it; of a turn that was sent again, the last time."""
    started_t: float
    """The engine first worked on it."""
    first_token_t: float
    finished_t: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    retractions: int

    @property
    def latency_s(self) -> float:
        return self.finished_t - self.sent_t

    @property
    def queue_s(self) -> float:
        """On its way and in the engine's queue."""
        return self.started_t - self.sent_t

    @property
    def prefill_s(self) -> float:
        return self.first_token_t - self.started_t

    @property
    def decode_s(self) -> float:
        return self.finished_t - self.first_token_t


class Turns:
    """The fold. `turns` is in the order of their ends."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._sent: dict[tuple[int, int], tuple[float, StartTurn]] = {}

    def observe(self, event: Event, actions: Sequence[Action]) -> None:
        """One core call: the event, then its actions, which happen at the event's time."""
        if isinstance(event, TurnFinished):
            sent = self._sent.pop((event.trajectory, event.turn), None)
            if sent is not None:
                self.turns.append(_turn(event, *sent))
        for action in actions:
            if isinstance(action, StartTurn):
                self._sent[action.trajectory, action.turn] = (event.t, action)


def _turn(e: TurnFinished, sent_t: float, a: StartTurn) -> Turn:
    return Turn(
        task=a.task,
        member=a.member,
        turn=e.turn,
        engine=e.engine,
        sent_t=sent_t,
        started_t=e.started_t,
        first_token_t=e.first_token_t,
        finished_t=e.t,
        prompt_tokens=e.prompt_tokens,
        output_tokens=e.output_tokens,
        cached_tokens=e.cached_tokens,
        retractions=e.retractions,
    )


def running(turns: Iterable[Turn]) -> list[tuple[float, int]]:
    """(time, turns in engines from then on), from the first start to the last end."""
    changes: dict[float, int] = {}
    for turn in turns:
        changes[turn.started_t] = changes.get(turn.started_t, 0) + 1
        changes[turn.finished_t] = changes.get(turn.finished_t, 0) - 1
    steps, now = [], 0
    for t in sorted(changes):
        now += changes[t]
        steps.append((t, now))
    return steps
