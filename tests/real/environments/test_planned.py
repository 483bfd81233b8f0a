"""Plans carried out with real tokens: equal content is equal tokens, everything else follows the plan."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from real.environments import environment
from real.environments.base import RealTask
from real.environments.planned import Planned, content_tokens, run_tokens
from real.models.tokenizer import CharTokenizer
from testbed.scenario import Scenario
from testbed.workloads import workload

pytestmark = pytest.mark.backend("CORE")

WORKLOAD = {
    "type": "lengths",
    "prompt": {"type": "uniform", "low": 20, "high": 60},
    "shared_prefix_tokens": 32,
    "reply": {"type": "uniform", "low": 3, "high": 12},
    "max_response_length": 10,
    "turns": {"type": "uniform", "low": 1, "high": 3},
    "observation": {"type": "fixed", "tokens": 5},
    "rewards": {"latency": {"type": "fixed", "seconds": 0.0}},
    "num_tasks": 6,
}


def scenario() -> Scenario:
    return Scenario.model_validate(
        {
            "cluster": {"gpu": "H100", "nodes": 1},
            "model": {"type": "preset", "name": "Qwen3-8B"},
            "workload": WORKLOAD,
            "algorithm": {"n_samples_per_prompt": 2},
            "placement": {"mode": "colocated", "num_gpus": 8},
            "rollout": {"admission": {"type": "sync"}},
            "weights": {
                "path": {"type": "fixed", "update_weight_transfer_mode": "cuda_ipc"},
                "transition": {"pause_generation_mode": "finish", "kv": "flush"},
            },
        }
    )


def planned() -> Planned:
    config = scenario()
    env = environment(None, tokenizer=CharTokenizer(), members=2, seed=0, workload=workload(config, Path()))
    assert isinstance(env, Planned)
    return env


def all_of(env: Planned) -> list[RealTask]:
    return list(iter(env.draw, None))


ids = st.integers(-(2**40), 2**41)


@given(content=ids, start=st.integers(0, 10**6), length=st.integers(0, 40), vocab=st.sampled_from([128, 1024, 49152]))
def test_tokens_are_a_function_of_content_and_position(content: int, start: int, length: int, vocab: int) -> None:
    tokens = content_tokens(content, start, length, vocab).tolist()
    assert len(tokens) == length
    assert all(0 <= t < vocab for t in tokens)
    one_by_one = [content_tokens(content, start + i, 1, vocab).item() for i in range(length)]
    assert tokens == one_by_one


@given(block=st.integers(-100, 100), a=st.integers(0, 127), b=st.integers(0, 127))
def test_contents_of_one_block_differ_everywhere(block: int, a: int, b: int) -> None:
    one, other = (content_tokens(block * 128 + c, 0, 50, 128).tolist() for c in (a, b))
    assert all((x == y) == (a == b) for x, y in zip(one, other, strict=True))


def test_contents_of_different_blocks_agree_by_chance_alone() -> None:
    n, vocab = 20_000, 128
    for other in (128, 128 * 999, -128):
        same = (content_tokens(0, 0, n, vocab) == content_tokens(other, 0, n, vocab)).sum()
        assert abs(same - n / vocab) < 5 * (n / vocab) ** 0.5
    counts = [int((content_tokens(5, 0, n, vocab) == t).sum()) for t in range(vocab)]
    assert max(counts) < 2 * n / vocab < 4 * min(counts)


def test_prompts_share_exactly_what_their_content_shares() -> None:
    tasks, again = all_of(planned()), all_of(planned())
    assert [t.prompt_ids for t in tasks] == [t.prompt_ids for t in again]
    assert len(tasks) == 6
    assert len({t.prompt_ids[:32] for t in tasks}) == 1, "the system prompt"
    assert len({t.prompt_ids[32] for t in tasks}) == 6, "and nothing after it"
    assert run_tokens([(-5, 0, 30)], 128) == run_tokens([(-5, 0, 10), (-5, 10, 20)], 128)


def test_turns_lengths_and_rewards_are_the_plan() -> None:
    env = planned()
    source = workload(scenario(), Path())

    async def run() -> None:
        turns = set()
        for task in all_of(env):
            plans = source.draw().plans  # type: ignore[union-attr]
            assert task.members == len(plans) == 2
            observations = []
            for member, plan in enumerate(plans):
                turns.add(len(plan.output_tokens))
                for turn, tokens in enumerate(plan.output_tokens):
                    limits = env.limits(task, member, turn, 50)
                    assert (limits.max_new_tokens, limits.ignore_eos, limits.stop_token_ids) == (tokens, True, ())
                    assert limits.finish_reason == ("stop" if plan.stops[turn] else "length")
                    call = env.after_turn(task, member, turn, [0] * tokens)
                    assert (call is None) == (turn + 1 == len(plan.output_tokens))
                    if call is not None:
                        observation = await env.run_tool(task, (0, member), call)
                        assert observation == await env.run_tool(task, (1, member), call)
                        assert len(observation) == plan.observation_tokens[turn] == 5
                        observations.append(tuple(observation))
                assert await env.reward(task, member, (), (), []) == plan.reward
            assert len(set(observations)) == len(observations)
        assert turns == {1, 2, 3}

    asyncio.run(run())


def test_kinds_and_fingerprint_are_the_workloads_and_there_is_nothing_to_learn_from() -> None:
    env, source = planned(), workload(scenario(), Path())
    assert (env.kinds, env.fingerprint) == (source.kinds, source.fingerprint)
    assert env.demonstrations(0) is None
