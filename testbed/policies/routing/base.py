"""What every router shares: the request it sees, the Protocol the core calls, and the bookkeeping of turns in open
engines.

Refuses to know any rule for choosing.
"""

from __future__ import annotations

from typing import Protocol

from testbed.policies.routing.loads import Loads


class RouteRequest:
    """One turn that needs an engine. Not changed once it is made."""

    __slots__ = ("block_tokens", "blocks", "group", "home", "prompt_tokens", "t", "task", "trajectory", "turn")

    def __init__(
        self,
        trajectory: int,
        group: int,
        turn: int,
        task: int,
        prompt_tokens: int,
        blocks: tuple[int, ...] = (),
        block_tokens: int = 0,
        home: int = -1,
        t: float = 0.0,
    ) -> None:
        self.trajectory = trajectory
        self.group = group
        self.turn = turn
        self.task = task
        self.prompt_tokens = prompt_tokens
        """Whole prompt of this turn, history included."""
        self.blocks = blocks
        """Prefix block ids, as far as known; equal leading ids are a shared prefix. Empty: the group's prompt counts as
        one block."""
        self.block_tokens = block_tokens
        """Tokens of one block; the last block may be cut by `prompt_tokens`."""
        self.home = home
        """Engine of the trajectory's previous turn; -1: none."""
        self.t = t
        """When it is asked, seconds; never falls from one request to the next."""


Fetch = tuple[int, int]
"""(engine, tokens): the leading tokens of the prompt whose KV is to come from that engine."""

NO_FETCH: Fetch = (-1, 0)


class UniformSource(Protocol):
    """A seeded generator, e.g. `numpy.random.Generator`."""

    def random(self) -> float:
        """Uniform in [0, 1)."""
        ...


class Router(Protocol):
    """Chooses engines; its state follows from the notifications alone."""

    @property
    def why(self) -> str:
        """Short name of the rule behind the last choice, for the journal."""
        ...

    @property
    def fetch(self) -> Fetch:
        """What the last choice wants to be brought to the engine before it computes the prompt; NO_FETCH: nothing."""
        ...

    def choose(self, request: RouteRequest) -> int | None:
        """An open engine, or None if none is open. Changes no load: `started` does, once the turn was sent."""
        ...

    def started(self, engine: int, request: RouteRequest) -> None:
        """The turn was sent to this engine."""
        ...

    def finished(self, engine: int, trajectory: int = -1) -> None:
        """The turn of this trajectory in this engine ended, well or not (-1: the one sent first). ValueError if the
        engine has none."""
        ...

    def open(self, engine: int) -> None:
        """The engine accepts new turns. Calling it twice does nothing."""
        ...

    def close(self, engine: int) -> None:
        """The engine accepts no new turns (paused, full, lost, other phase); turns in it may still finish."""
        ...

    def cache_dropped(self, engine: int) -> None:
        """The engine's KV is gone (flush, weight change); a router that is not told of it takes no notice."""
        ...

    def lost(self, engine: int) -> None:
        """The engine is gone, which every router notices: its connections are closed."""
        ...


class LoadTracking(Router):
    """Base of all routers: counts turns in engines and remembers which engines are open."""

    why: str = ""
    fetch: Fetch = NO_FETCH

    def __init__(self, num_engines: int) -> None:
        self.loads = Loads(num_engines)

    def started(self, engine: int, request: RouteRequest) -> None:
        self.loads.started(engine)

    def finished(self, engine: int, trajectory: int = -1) -> None:
        self.loads.finished(engine)

    def open(self, engine: int) -> None:
        self.loads.open(engine)

    def close(self, engine: int) -> None:
        self.loads.close(engine)

    def cache_dropped(self, engine: int) -> None:
        pass

    def lost(self, engine: int) -> None:
        pass
