"""An earlier run as a workload: its prompts, lengths, tool times and rewards, by (task, member, turn).

Responsible for reading them out of a journal's events and actions. It refuses to know which policies and which
layout that run had: only what does not depend on them is replayed. Two things do depend a little, and are taken as
recorded: a tool's or verifier's time includes the wait for a slot, and what that run cut short (a trajectory by an
abort, a reply by a smaller cap) is as long as it got.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec
from msgspec import Struct, field

from testbed.core.actions import AnyAction, ComputeSignals, RunTool, StartTurn
from testbed.core.events import AnyEvent, SignalReady, TaskArrived, ToolFinished, TurnFinished
from testbed.run_files import JOURNAL
from testbed.scenario.workload import JournalWorkload
from testbed.workloads.errors import WorkloadError
from testbed.workloads.files import find, lines
from testbed.workloads.outcomes import needs_environment, outcomes
from testbed.workloads.plan import BLOCK_TOKENS, Plan, Run, Task, prompt_content
from testbed.workloads.trace import explain, fresh_blocks


class _Line(Struct):
    """One line; the header has neither field."""

    event: AnyEvent | None = None
    actions: list[AnyAction] = field(default_factory=list)
    level: str = "full"
    backend: str = ""


class Recorded(Struct):
    """One recorded trajectory. -1 where the journal does not say."""

    turns: dict[int, int] = field(default_factory=dict)
    """turn -> output tokens."""
    tools: list[tuple[float, int]] = field(default_factory=list)
    """(seconds, observation tokens) in order."""
    complete: bool = False
    reward: float | None = None
    reward_s: float = -1.0
    asked: float = -1.0
    """When its last tool or signal was asked for."""


class RecordedRun(Struct):
    """Tasks in order of arrival, and the best record of each (task, member): the first complete one, else the
    longest."""

    arrivals: dict[int, TaskArrived] = field(default_factory=dict)
    members: dict[int, dict[int, Recorded]] = field(default_factory=dict)
    """task -> member -> record with at least one turn."""
    sha256: str = ""
    backend: str = ""
    """`simulated` or `real`, as the header says."""


def read_run(name: str, base_dir: Path) -> RecordedRun:
    """Read a run folder or a journal. Raises WorkloadError."""
    path = find(name, base_dir)
    if path.is_dir():
        path = find(JOURNAL, path)
    digest = hashlib.sha256()
    run = RecordedRun()
    records: dict[int, Recorded] = {}
    owners: dict[int, tuple[int, int]] = {}
    decode = msgspec.json.Decoder(_Line).decode
    for number, text in lines(path, digest):
        try:
            line = decode(text)
        except msgspec.DecodeError as error:
            raise WorkloadError(path, number, explain(error)) from error
        if line.level != "full":
            raise WorkloadError(
                path, number, f"the journal is {line.level}; a replay needs one written with `journal: full`"
            )
        run.backend = run.backend or line.backend
        if line.event is not None:
            _observe(line, run, records, owners)
    for trajectory, (task, member) in owners.items():
        record = records[trajectory]
        best = run.members.setdefault(task, {}).get(member)
        if 0 in record.turns and (best is None or (not best.complete and _better(record, best))):
            run.members[task][member] = record
    run.arrivals = {task: arrived for task, arrived in run.arrivals.items() if run.members.get(task)}
    if not run.arrivals:
        raise WorkloadError(path, None, "holds no finished turn")
    run.sha256 = digest.hexdigest()
    return run


def _better(record: Recorded, best: Recorded) -> bool:
    return record.complete or len(record.turns) > len(best.turns)


def _observe(line: _Line, run: RecordedRun, records: dict[int, Recorded], owners: dict[int, tuple[int, int]]) -> None:
    """Take what one event and its actions say. Actions happen at the time of their event."""
    event = line.event
    assert event is not None
    if isinstance(event, TaskArrived):
        run.arrivals.setdefault(event.task, event)
    elif isinstance(event, TurnFinished):
        record = records.setdefault(event.trajectory, Recorded())
        record.turns[event.turn] = event.output_tokens
        record.complete = not event.continues
    elif isinstance(event, ToolFinished):
        record = records.setdefault(event.trajectory, Recorded())
        record.tools.append((event.t - record.asked if record.asked >= 0 else 0.0, event.observation_tokens))
    elif isinstance(event, SignalReady) and event.signal == "reward":
        for trajectory, value in zip(event.trajectories, event.values, strict=False):
            record = records.setdefault(trajectory, Recorded())
            record.reward, record.reward_s = value, event.t - record.asked if record.asked >= 0 else -1.0
    for action in line.actions:
        if isinstance(action, StartTurn):
            owners[action.trajectory] = (action.task, action.member)
            records.setdefault(action.trajectory, Recorded())
        elif isinstance(action, RunTool):
            records.setdefault(action.trajectory, Recorded()).asked = event.t
        elif isinstance(action, ComputeSignals) and action.signal == "reward":
            for trajectory in action.trajectories:
                records.setdefault(trajectory, Recorded()).asked = event.t


def journal_tasks(
    config: JournalWorkload, run: RecordedRun, members: int, seed: int, ignore_eos: bool
) -> Iterator[Task]:
    """The recorded tasks in order of arrival. A member without a record takes the next recorded member's
    (cyclically); a reward or verification time without a record is drawn from `rewards`; environment times are
    always drawn from `tools`."""
    results = outcomes(config.rewards, config.tools, members, seed)
    cap = config.max_response_length
    configured = needs_environment(config.tools)
    contents: dict[int, int] = {}
    for index, (task, arrived) in enumerate(run.arrivals.items()):
        known = [record for _, record in sorted(run.members[task].items())]
        own = run.members[task]
        plans = []
        drawn = list(islice(results, members))[: arrived.members or members]
        for member, (reward, reward_s, prepare_s, release_s) in enumerate(drawn):
            record = own.get(member) or known[member % len(known)]
            tokens, stops, tool_s, observed = _turns(record, cap, ignore_eos)
            if record.reward is not None:
                reward = record.reward
                reward_s = record.reward_s if record.reward_s >= 0 else reward_s
            plans.append(Plan(tokens, stops, tool_s, observed, reward, reward_s, prepare_s, release_s))
        runs = _prompt(arrived, index, contents)
        blocks = arrived.blocks or fresh_blocks(index, arrived.prompt_tokens)
        environment = arrived.environment or configured
        yield Task(index, runs, arrived.prompt_tokens, blocks, arrived.block_tokens or BLOCK_TOKENS, environment, plans)


def _turns(
    record: Recorded, cap: int, ignore_eos: bool
) -> tuple[tuple[int, ...], tuple[bool, ...], tuple[float, ...], tuple[int, ...]]:
    """(output tokens, stops, tool seconds, observation tokens) of the turns 0 .. k - 1 that were finished without a
    gap."""
    k = next((turn for turn in range(len(record.turns)) if turn not in record.turns), len(record.turns))
    k = min(k, len(record.tools) + 1)
    turns = [record.turns[turn] for turn in range(k)]
    tokens = tuple([cap if ignore_eos else min(max(n, 1), cap) for n in turns])
    stops = tuple([n < cap for n in tokens])
    return tokens, stops, tuple([s for s, _ in record.tools[: k - 1]]), tuple([n for _, n in record.tools[: k - 1]])


def _prompt(arrived: TaskArrived, index: int, contents: dict[int, int]) -> tuple[Run, ...]:
    """Recorded blocks as runs (equal ids, equal content); what they do not cover is fresh. Ids: even for prompts,
    odd for blocks."""
    runs: list[Run] = []
    left = arrived.prompt_tokens
    for block in arrived.blocks:
        length = min(arrived.block_tokens, left)
        if length <= 0:
            break
        runs.append((prompt_content(2 * contents.setdefault(block, len(contents)) + 1), 0, length))
        left -= length
    if left > 0 or not runs:
        runs.append((prompt_content(2 * index), 0, left))
    return tuple(runs)
