"""Mooncake's conversation trace, replayed: hits of an LRU cache by its size, and the ranking of routing policies.

Expectations: an offline LRU over the trace's block ids, written here, and the ranking that was published.
"""

from __future__ import annotations

import gzip
import json
from collections import OrderedDict
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from sim.run import simulate
from testbed.metrics.summary import RunSummary
from testbed.scenario.study import load_study
from tests.support.scenarios import scenario
from tests.support.simulated import HERE, LINEAR

BLOCK = 512
ROWS = 12_031
PUBLISHED = Path(__file__).resolve().parents[2] / "scenarios" / "published"


@cache
def rows() -> list[dict[str, Any]]:
    raw = (files("testbed") / "data" / "traces" / "mooncake_conversation_trace.jsonl.gz").read_bytes()
    return [json.loads(line) for line in gzip.decompress(raw).splitlines()]


def lru_share(blocks: int | None) -> float:
    """Cached share of the prompt tokens with an LRU cache of so many blocks (None: unbounded), request by request.

    Ids are of prefixes: a request finds the leading ids that are there, and uses all of its own, the first one last (a
    prefix outlives what follows it). The last token of a prompt is always computed.
    """
    held: OrderedDict[int, int] = OrderedDict()
    tokens = found = total = 0
    for row in rows():
        ids, length = row["hash_ids"], row["input_length"]
        hit = 0
        for block in ids:
            if block not in held:
                break
            hit += held[block]
        found += min(hit, length - 1)
        total += length
        for place in range(len(ids) - 1, -1, -1):
            block, size = ids[place], min(BLOCK, length - BLOCK * place)
            if block in held:
                held.move_to_end(block)
            else:
                held[block] = size
                tokens += size
        while blocks is not None and tokens > BLOCK * blocks:
            tokens -= held.popitem(last=False)[1]
    return found / total


@pytest.mark.parametrize("blocks", [1000, 4000, 16_000, 50_000])
def test_rk_13_hit_share_by_cache_size_is_that_of_an_offline_lru(blocks: int) -> None:
    """One request at a time, one token of output: the cache is all prompts. Within 0.02."""
    given = scenario(
        model={
            "type": "inline",
            "num_hidden_layers": 1,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "vocab_size": 100,
        },
        workload={"type": "trace", "trace": "mooncake_conversation", "max_response_length": 1},
        algorithm={"advantage": "distillation", "n_samples_per_prompt": 1, "rollout_batch_size": 227},
        placement={
            "mode": "disaggregated",
            "rollout_num_gpus": 1,
            "actor_num_gpus": 1,
            "rollout_num_gpus_per_engine": 1,
            "roles": {"external_seconds_per_trajectory": 0.0},
        },
        rollout__engine={"max_total_num_tokens": BLOCK * blocks, "max_running_requests": 1},
        rollout__admission={"type": "fully_async", "async_max_concurrent_groups": 1},
        experience={"buffer": {"type": "insert_when_ready", "async_data_buffer_capacity_factor": 2.0}},
        experience__staleness={"action": "none"},
        training__cost={"type": "rate", "samples_per_s": 1e6},
        weights__update_weights_interval=1000,
        weights__transition={"pause_generation_mode": "in_place", "kv": "keep"},
        run={"num_rollout": ROWS // 227, "warmup_steps": 0, "journal": "off"},
        simulation__engine_costs=LINEAR,
    )
    done = simulate(given, HERE)
    assert done.problem == ""
    share = done.summary.kv.cached_tokens / done.summary.kv.prompt_tokens
    assert share == pytest.approx(lru_share(blocks), abs=0.02)
    assert done.summary.kv.prompt_tokens == sum(row["input_length"] for row in rows())


def test_the_offline_curve_is_the_traces() -> None:
    """37.4 % of the tokens with an unbounded cache (data.md counts whole blocks); rises with the size."""
    shares = [lru_share(blocks) for blocks in (1000, 4000, 16_000, 50_000, None)]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(0.374, abs=0.01)


EVEN = ("workload.swing=null", "workload.time_scale=0.8")
"""Arrivals as they are in the trace."""


@cache
def replay(variant: str) -> RunSummary:
    """The first 4,540 requests of the published study (its whole hour: `testbed published --only mooncake`)."""
    study = load_study(PUBLISHED / "mooncake.yaml", ["run.num_rollout=20", *EVEN])
    given = next(v.scenario for v in study.variants if v.name == variant)
    done = simulate(given, PUBLISHED)
    assert done.problem == ""
    return done.summary


RANKING = ("random", "load balancing", "cache-aware", "KV-centric")


def test_rk_11_time_to_first_token_ranks_as_published() -> None:
    """8 prefill and 8 decode engines. Published: 92.07, 60.41, 14.36, 6.26 s. (With the study's swing the order holds
    as well: `testbed published --only mooncake`.)"""
    seconds = [replay(v).trajectory.queue + replay(v).trajectory.prefill for v in RANKING]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > 5 * seconds[2] > 5 * seconds[3]


def test_rk_11_hit_share_per_policy() -> None:
    """What 8 caches give together: by chance an eighth of what can be reused at first, nearly all where prefixes
    travel. Nobody beats the unbounded cache."""
    shares = [replay(v).kv.cached_tokens / replay(v).kv.prompt_tokens for v in RANKING]
    assert shares[0] == pytest.approx(shares[1], abs=0.02)
    assert shares[1] < 0.6 * shares[2] and shares[2] < shares[3] <= lru_share(None)
