"""Synthetic tasks: prompt and reply lengths, turns, observations and tool times from distributions.

Responsible for composing the streams into plans, a chunk of tasks at a time. It refuses to know the distributions'
formulas and where a recorded prompt length was read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count, repeat

import numpy as np

from testbed.scenario.workload import FixedLength, LengthsWorkload, ReplyLength, TraceLength
from testbed.workloads.distributions import (
    DurationSampler,
    LengthSampler,
    Tokens,
    duration_sampler,
    length_sampler,
    stream,
)
from testbed.workloads.errors import WorkloadError
from testbed.workloads.outcomes import CHUNK, Columns, Outcome, needs_environment, outcome_columns, outcomes
from testbed.workloads.plan import BLOCK_TOKENS, SYSTEM_PROMPT, Plan, Run, Task, prompt_content
from testbed.workloads.trace import Trace, fresh_blocks

Prompt = tuple[tuple[Run, ...], int, tuple[int, ...], int]
"""(runs, tokens, routing blocks, tokens per block)."""


def length_tasks(
    config: LengthsWorkload, trace: Trace | None, members: int, seed: int, ignore_eos: bool
) -> Iterator[Task]:
    """Tasks without end, or `num_tasks` of them. `trace` holds the prompts if their length is a trace.

    Raises WorkloadError before the first task if a distribution cannot have its parameters.
    """
    prompts = _recorded(config, trace) if trace is not None else _drawn(config, seed)
    plans = _single_turn if config.turns == FixedLength(tokens=1) else _multi_turn
    drawn = plans(config, members, seed, ignore_eos)
    return _tasks(config, prompts, drawn, members)


def _tasks(
    config: LengthsWorkload, prompts: Iterator[Prompt], plans: Iterator[list[Plan]], members: int
) -> Iterator[Task]:
    environment = needs_environment(config.tools)
    indices = iter(range(config.num_tasks)) if config.num_tasks is not None else count()
    for chunk in plans:
        for first in range(0, CHUNK * members, members):
            index = next(indices, None)
            if index is None:
                return
            runs, tokens, blocks, block_tokens = next(prompts)
            yield Task(index, runs, tokens, blocks, block_tokens, environment, chunk[first : first + members])


def arrival_times(rate_per_s: float, seed: int) -> Iterator[float]:
    """Poisson arrivals: seconds, rising, without end. The first gap is exponential like all others."""
    rng, now = stream(seed, "arrivals"), 0.0
    while True:
        for gap in rng.exponential(1.0 / rate_per_s, CHUNK).tolist():
            now += gap
            yield now


# --- prompts ----------------------------------------------------------------------------------------------------------


def _drawn(config: LengthsWorkload, seed: int) -> Iterator[Prompt]:
    """Fresh prompts behind the shared prefix.

    The prefix of S tokens is cut into ceil(S / 512) routing blocks of equal size (rounded down), so that it is
    visible as shared.
    """
    assert not isinstance(config.prompt, TraceLength)
    sample = _sampler(config.prompt, None, 1, "prompt")
    shared = config.shared_prefix_tokens
    block_tokens = shared // -(-shared // BLOCK_TOKENS) if shared else BLOCK_TOKENS
    return _fresh(sample, seed, shared, block_tokens)


def _fresh(sample: LengthSampler, seed: int, shared: int, block_tokens: int) -> Iterator[Prompt]:
    rng, ones = stream(seed, "prompts"), np.ones(CHUNK, dtype=np.int64)
    prefix: tuple[Run, ...] = ((SYSTEM_PROMPT, 0, shared),) if shared else ()
    numbers = count()
    while True:
        for own in sample(rng, rng, ones).tolist():
            number, tokens = next(numbers), shared + own
            blocks = fresh_blocks(number, tokens, block_tokens, shared // block_tokens)
            yield (*prefix, (prompt_content(number), 0, own)), tokens, blocks, block_tokens


def _recorded(config: LengthsWorkload, trace: Trace) -> Iterator[Prompt]:
    """The trace's prompts in its order, over and over; the shared prefix goes in front and counts as whole routing
    blocks."""
    shared, rows = config.shared_prefix_tokens, len(trace.prompt_tokens)
    prefix: tuple[Run, ...] = ((SYSTEM_PROMPT, 0, shared),) if shared else ()
    ids = tuple(range(2**40, 2**40 + -(-shared // BLOCK_TOKENS)))  # positive: no block of the trace
    for number in count():
        passes, row = divmod(number, rows)
        runs, blocks = trace.prompt(row, number, passes)
        yield (*prefix, *runs), shared + trace.prompt_tokens[row], (*ids, *blocks), BLOCK_TOKENS


# --- plans ------------------------------------------------------------------------------------------------------------


def _sampler(config: ReplyLength, cap: int | None, least: int, what: str) -> LengthSampler:
    try:
        return length_sampler(config, cap, least)
    except ValueError as error:
        raise WorkloadError(None, None, f"workload.{what}: {error}") from error


def _replies(config: LengthsWorkload, seed: int, ignore_eos: bool) -> Callable[[Tokens], Tokens]:
    """counts[tasks] -> tokens[sum(counts)]; the cap for all of them if end-of-sequence is ignored."""
    cap = config.max_response_length
    sample = _sampler(config.reply, cap, 1, "reply")
    if ignore_eos:
        return lambda counts: np.full(int(counts.sum()), cap, dtype=np.int64)
    tasks, own = stream(seed, "reply_tasks"), stream(seed, "replies")
    return lambda counts: sample(tasks, own, counts)


def _single_turn(config: LengthsWorkload, members: int, seed: int, ignore_eos: bool) -> Iterator[list[Plan]]:
    """Chunks of CHUNK x members plans of one turn. The short way of `_multi_turn`: the same plans, no per-turn work."""
    draw = _replies(config, seed, ignore_eos)
    columns = outcome_columns(config.rewards, config.tools, members, seed)
    return _short(draw, columns, config.max_response_length, members)


def _short(
    draw: Callable[[Tokens], Tokens], columns: Iterator[Columns], cap: int, members: int
) -> Iterator[list[Plan]]:
    counts, none = np.full(CHUNK, members, dtype=np.int64), repeat(())
    for results in columns:
        lengths = draw(counts)
        yield list(map(Plan, zip(lengths.tolist()), zip((lengths < cap).tolist()), none, none, *results))


def _multi_turn(config: LengthsWorkload, members: int, seed: int, ignore_eos: bool) -> Iterator[list[Plan]]:
    """Chunks of CHUNK x members plans of one or more turns."""
    replies = _replies(config, seed, ignore_eos)
    turns = _sampler(config.turns, None, 1, "turns")
    observation = _sampler(config.observation, None, 0, "observation")
    tool = duration_sampler(config.tool_time)
    results = outcomes(config.rewards, config.tools, members, seed)
    return _long(replies, turns, observation, tool, results, config.max_response_length, members, seed)


def _long(
    replies: Callable[[Tokens], Tokens],
    turns: LengthSampler,
    observation: LengthSampler,
    tool: DurationSampler,
    results: Iterator[Outcome],
    cap: int,
    members: int,
    seed: int,
) -> Iterator[list[Plan]]:
    turn_rng, tool_rng = stream(seed, "turns"), stream(seed, "tools")
    observation_tasks, observation_own = stream(seed, "observation_tasks"), stream(seed, "observations")
    ones = np.ones(CHUNK * members, dtype=np.int64)
    while True:
        calls = turns(turn_rng, turn_rng, ones)
        per_task = calls.reshape(CHUNK, members).sum(axis=1)
        lengths = replies(per_task)
        gaps = per_task - members  # tool calls: one fewer than turns, for every member
        outputs, ended = tuple(lengths.tolist()), tuple((lengths < cap).tolist())
        observed = tuple(observation(observation_tasks, observation_own, gaps).tolist())
        seconds = tuple(tool(tool_rng, int(gaps.sum())).tolist())
        plans, turn, gap = [], 0, 0
        for k, result in zip(calls.tolist(), results, strict=False):
            next_turn, next_gap = turn + k, gap + k - 1
            plans.append(
                Plan(
                    outputs[turn:next_turn],
                    ended[turn:next_turn],
                    seconds[gap:next_gap],
                    observed[gap:next_gap],
                    *result,
                )
            )
            turn, gap = next_turn, next_gap
        yield plans
