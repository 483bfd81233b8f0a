"""Several turns over two engines with every routing policy, and over a weight update with every rule for old KV: what
was found in the engines' caches is what the radix tree says, to the token."""

from __future__ import annotations

from typing import Any

import pytest

from testbed.scenario import Scenario
from tests.support.cached_tokens import Turn, predicted, right, version_of
from tests.support.real_runs import carried_out
from tests.support.scenarios import scenario

RATE = {"prefill_tokens_per_s": 2e4}
ROUTING: dict[str, dict[str, Any]] = {
    "random": {},
    "round_robin": {},
    "power_of_two": {},
    "least_load": {"load": "prompt_tokens"},
    "consistent_hashing": {},
    "bounded_consistent_hashing": {},
    "prefix_hash": {"prefix_token_count": 64},
    "session_affinity": {},
    "cache_aware": {},
    "cache_aware, library": {"cache_threshold": 0.5, "balance_abs_threshold": 32, "balance_rel_threshold": 1.1},
    "cost": {"decode_seconds_per_turn": 0.01, **RATE},
    "dynamo_kv": {},
    "mooncake": {"transfer_tokens_per_s": None, **RATE},
    "preble": {"decode_seconds_per_turn": 0.01, **RATE},
}
"""Every routing type with its options; `cache_aware` with the defaults of SGLang's command line and of its library."""

TASKS, MEMBERS, TURNS = 13, 2, 4


def several_turns(routing: str, tasks: int = TASKS, **changes: Any) -> Scenario:
    """A system prompt that all share, a question that two members share, and histories of their own."""
    from tests.support.real_rig import for_real

    config = for_real(
        scenario(
            algorithm={"n_samples_per_prompt": MEMBERS, "rollout_batch_size": tasks},
            workload__turns={"type": "fixed", "tokens": TURNS},
            rollout__routing={"type": routing.partition(",")[0], **ROUTING[routing]},
            **{"run__num_rollout": 1, **changes},
        )
    )
    tree = config.model_dump(mode="json")
    tree["workload"] |= {
        "shared_prefix_tokens": 16,
        "prompt": {"type": "uniform", "low": 60, "high": 120},
        "reply": {"type": "uniform", "low": 4, "high": 12},
        "observation": {"type": "fixed", "tokens": 5},
        "max_response_length": 16,
        "tool_time": {"type": "exponential", "mean_s": 0.05},
    }
    return Scenario.model_validate(tree)


def found(turns: list[Turn], from_turn: int = 0) -> float:
    """Share of the prompts' tokens that came from a cache."""
    later = [e for e, _ in turns if e.turn >= from_turn]
    return sum(e.cached_tokens for e in later) / sum(e.prompt_tokens for e in later)


@pytest.fixture(scope="module")
def runs(rig: Any) -> dict[str, list[Turn]]:
    return {name: carried_out(rig, several_turns(name), trains=False).turns for name in ROUTING}


@pytest.mark.parametrize("routing", ROUTING)
def test_rk_01_and_rk_11_the_radix_tree_says_what_each_policys_turns_find(
    runs: dict[str, list[Turn]], routing: str
) -> None:
    turns = runs[routing]
    assert len(turns) == TASKS * MEMBERS * TURNS
    assert {e.engine for e, _ in turns} == {0, 1}
    assert right(turns, predicted(turns)) >= 0.99


@pytest.mark.parametrize("routing", ["random", "round_robin", "power_of_two", "least_load"])
def test_turns_that_change_engines_do_not_find_what_the_other_one_has(
    runs: dict[str, list[Turn]], routing: str
) -> None:
    """A tree for both would be wrong in many turns: the check above tells engines apart."""
    turns = runs[routing]
    assert right(turns, predicted(turns, one_cache=True)) < 0.9


def test_rk_12_sticky_turns_find_their_history_and_random_ones_a_part_of_it(runs: dict[str, list[Turn]]) -> None:
    """More than 0.9 of all prompt tokens from the second turn on, and of all that any engine had computed before."""
    sticky = runs["session_affinity"]
    assert found(sticky, from_turn=1) > 0.9
    assert sum(e.cached_tokens for e, _ in sticky) > 0.9 * sum(predicted(sticky, one_cache=True).values())
    missed, missed_by_chance = (1 - found(runs[name], from_turn=1) for name in ("session_affinity", "random"))
    assert missed_by_chance > 2 * missed


@pytest.mark.parametrize(
    ("transition", "namespace"),
    [
        ({"pause_generation_mode": "retract", "kv": "flush"}, version_of),
        ({"pause_generation_mode": "in_place", "kv": "salt_by_version"}, version_of),
        ({"pause_generation_mode": "in_place", "kv": "keep"}, lambda _: None),
    ],
    ids=["flush", "salt_by_version", "keep"],
)
def test_rk_08_kv_of_former_weights_is_found_where_the_rule_keeps_it_and_nowhere_else(
    rig: Any, transition: dict[str, str], namespace: Any
) -> None:
    """Two batches with an update in between: the system prompt is what the second could find of the first."""
    config = several_turns("session_affinity", 4, run__num_rollout=2, weights__transition=transition)
    turns = carried_out(rig, config).turns
    assert {version_of(e) for e, _ in turns} == {0, 1}
    assert right(turns, predicted(turns, namespace=namespace)) >= 0.99
    old = [e.kv_version == 0 for e, _ in turns if version_of(e) == 1 and e.cached_tokens]
    assert old and set(old) == {transition["kv"] == "keep"}, "turns say which weights the KV that they found is of"
