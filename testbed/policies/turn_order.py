"""Which turn goes first where not all may run at once?

| type | first |
|---|---|
| `fifo` | who has waited longest |
| `group_length` | first members of groups, then members of the group whose finished members were longest (Seer) |

Long trajectories that start late are what a synchronous step waits for; members of a group are about equally long, so
the first of them to finish says which groups to hurry. Refuses to know engines, limits and time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Protocol

from testbed.core.records import Group, Trajectory
from testbed.scenario.rollout import FifoTurns, TurnOrder


class Turns(Protocol):
    """Trajectories that want an engine. A `deque` is one."""

    def append(self, t: Trajectory, /) -> None:
        """It wants an engine."""

    def appendleft(self, t: Trajectory, /) -> None:
        """Its turn was lost: it goes before all others."""

    def popleft(self) -> Trajectory:
        """Take the first. IndexError if there is none."""

    def remove(self, t: Trajectory, /) -> None:
        """It waits no longer. ValueError if it does not wait."""

    def __getitem__(self, index: int, /) -> Trajectory: ...

    def __iter__(self) -> Iterator[Trajectory]: ...

    def __len__(self) -> int: ...


class ByGroupLength:
    """O(log groups) a turn. `unknown`: tokens that a group without a finished member is expected to have."""

    def __init__(self, unknown: int) -> None:
        self._unknown = unknown
        self._first: deque[Trajectory] = deque()
        """Lost turns, then first members."""
        self._others: dict[int, deque[Trajectory]] = {}
        """Group -> its waiting members."""
        self._heap: list[tuple[int, int]] = []
        """(-expected tokens, group); an entry whose group expects another number is void."""
        self._count = 0

    def expected(self, group: Group) -> int:
        return group.longest or self._unknown

    def append(self, t: Trajectory) -> None:
        self._count += 1
        if t.member == 0:
            self._first.append(t)
            return
        group = t.group
        waiting = self._others.get(group.id)
        if waiting is None:
            self._others[group.id] = deque((t,))
            heappush(self._heap, (-self.expected(group), group.id))
        else:
            waiting.append(t)

    def appendleft(self, t: Trajectory) -> None:
        self._count += 1
        self._first.appendleft(t)

    def learned(self, group: Group) -> None:
        """A member of this group has finished."""
        if group.id in self._others:
            heappush(self._heap, (-self.expected(group), group.id))

    def _head(self) -> deque[Trajectory]:
        if self._first:
            return self._first
        while self._heap:
            expected, id = self._heap[0]
            waiting = self._others.get(id)
            if waiting and self.expected(waiting[0].group) == -expected:
                return waiting
            heappop(self._heap)
        raise IndexError("no turn waits")

    def popleft(self) -> Trajectory:
        head = self._head()
        t = head.popleft()
        self._count -= 1
        if not head and head is not self._first:
            del self._others[t.group.id]
        return t

    def remove(self, t: Trajectory) -> None:
        waiting = self._others.get(t.group.id)
        if waiting is not None and t in waiting:
            waiting.remove(t)
            if not waiting:
                del self._others[t.group.id]
        else:
            self._first.remove(t)
        self._count -= 1

    def __getitem__(self, index: int) -> Trajectory:
        if index:
            raise IndexError("only the first turn is known")
        return self._head()[0]

    def __iter__(self) -> Iterator[Trajectory]:
        yield from self._first
        for waiting in self._others.values():
            yield from waiting

    def __len__(self) -> int:
        return self._count


def turn_queue(order: TurnOrder, unknown: int) -> Turns:
    """The queue that the scenario asks for."""
    return deque() if isinstance(order, FifoTurns) else ByGroupLength(unknown)
