"""Which programs run, pause, resume? The space-time rule of ThunderAgent (arXiv 2602.13692).

A program is a task's whole life: model calls (reasoning) and tools (acting) in turns, its context c in tokens, the
engine where its KV lies. Its memory costs space x time whether it computes or not; memory that a tool holds for long is
the part that buys nothing. With C the KV of an engine, a tool that has run for t seconds, and f(t) = 2^(-t / half
life):

| question | rule |
|---|---|
| too much? | sum over reasoning of c + sum over acting of w c f(t) > C |
| who pauses? | by falling 1/c + I(acting): acting first, shortest first, until it fits |
| who is restored? | by falling 1/c + I(reasoning), to the engine with most room, while it fits |

Shortest first, because what is paused is computed again at a cost that grows as c^2, and only the sum must fit. Refuses
to know time (it is handed in), engines' caches and single requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from testbed.scenario.programs import ThunderAgent

REASONING = frozenset(("reasoning", "marked", "paused"))
WAITING = frozenset(("new", "paused", "paused_acting"))
"""States in which a program waits to be let in or restored."""


class Program:
    """One task's life. States are those of `testbed.core.states.PROGRAM`."""

    __slots__ = ("acting_since", "arrived", "group", "id", "place", "prompt_tokens", "state", "tokens", "waiting_since")

    def __init__(self, id: int, group: int, prompt_tokens: int, arrived: int) -> None:
        self.id = id
        self.group = group
        self.prompt_tokens = prompt_tokens
        self.tokens = prompt_tokens
        """c: the context that its next call, or the one under way, starts from."""
        self.arrived = arrived
        """Order of arrival; ties go to the first."""
        self.place = -1
        """Engine where its KV lies or is to lie; -1: none."""
        self.state = "new"
        self.acting_since = 0.0
        self.waiting_since = 0.0

    @property
    def acting(self) -> bool:
        return self.state in ("acting", "paused_acting")


class SpaceTime:
    """The rule over one engine's programs, or over the line of those that wait."""

    def __init__(self, config: ThunderAgent) -> None:
        self.config = config
        self._rank = {"paused": 0, "new": 1, "paused_acting": 2} if config.restore_order == "best_fit" else {}

    # --- how much ---------------------------------------------------------------------------------------------------

    def need(self, p: Program) -> int:
        """Tokens of a program that computes."""
        return p.tokens + self.config.reserve_tokens

    def weight(self, p: Program, now: float, decays: bool) -> float:
        """Tokens that a program counts for: need, or w c f(t) + reserve while it acts."""
        if not p.acting:
            return self.need(p)
        c = self.config
        share = c.acting_token_weight
        if decays and c.acting_half_life_s is not None:
            share *= 2.0 ** (-(now - p.acting_since) / c.acting_half_life_s)
        return p.tokens * share + c.reserve_tokens

    def used(self, active: Sequence[Program], now: float, decays: bool) -> float:
        """Tokens of an engine that its active programs count for."""
        total = sum([self.weight(p, now, decays) for p in active])
        if self.config.count_shared_prompts_once:
            seen: set[int] = set()
            for p in active:
                if p.group in seen:
                    total -= p.prompt_tokens
                seen.add(p.group)
        return max(total, 0.0)

    # --- who pauses -------------------------------------------------------------------------------------------------

    def to_pause(self, active: Iterable[Program], capacity: int, now: float) -> list[Program]:
        """Programs of one engine to pause, in order. What is marked already counts as gone."""
        config = self.config
        left = [p for p in active if p.state != "marked"]
        decays = config.decay == "always"
        if self.used(left, now, decays) <= config.pause_above * capacity:
            return []
        target = config.pause_to * capacity
        gone: list[Program] = []
        for p in sorted(left, key=_pause_key):
            if len(left) <= 1 or self.used(left, now, decays) <= target:
                break  # alone it may stay: nothing else would use the room
            left.remove(p)
            gone.append(p)
        return gone

    # --- who comes back ---------------------------------------------------------------------------------------------

    def line(self, waiting: Iterable[Program]) -> list[Program]:
        """Those that wait, in the order in which they are looked at."""
        if self._rank:
            rank = self._rank
            return sorted(waiting, key=lambda p: (rank[p.state], -p.tokens, p.arrived))
        return sorted(waiting, key=_restore_key)

    def overdue(self, p: Program, now: float) -> bool:
        limit = self.config.forced_restore_s
        return limit is not None and p.state != "new" and now - p.waiting_since >= limit

    def room_for(self, p: Program, free: Sequence[float], now: float) -> int:
        """Engine that it goes to, -1: it fits nowhere. A program that acts needs what it counts for now."""
        need = self.weight(p, now, True)
        fitting = [e for e, room in enumerate(free) if need <= room]
        if not fitting:
            return -1
        if self._rank:
            return min(fitting, key=lambda e: (free[e], e))
        return min(fitting, key=lambda e: (-free[e], e))


def _pause_key(p: Program) -> tuple[bool, int, int]:
    """Falling 1/c + I(acting)."""
    return not p.acting, p.tokens, p.arrived


def _restore_key(p: Program) -> tuple[bool, int, int]:
    """Falling 1/c + I(reasoning)."""
    return p.acting, p.tokens, p.arrived
