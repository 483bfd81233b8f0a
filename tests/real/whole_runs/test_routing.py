"""Where turns go and what is saved there, on real engines: each choice is the rule's, worked out again from the run's
events, and the engines' own counts (cached tokens, tokens computed, log-probabilities) say what it led to."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from testbed.commands.ablation import saved, switches
from testbed.core import actions as do
from testbed.core import events as said
from testbed.scenario import Scenario
from tests.contract.test_contract import every
from tests.support.real_runs import RealRun, carried_out
from tests.support.scenarios import scenario

ENGINES = (0, 1)
ONE_BATCH: dict[str, Any] = {"run__num_rollout": 1}


def fixed(tokens: int) -> dict[str, Any]:
    return {"type": "fixed", "tokens": tokens}


def real(workload: dict[str, Any], **changes: Any) -> Scenario:
    """A scenario for the rig whose workload is as it is given here: real tokens and real seconds."""
    from tests.support.real_rig import for_real

    tree = for_real(scenario(**changes)).model_dump(mode="json")
    tree["workload"] = workload if "path" in workload else tree["workload"] | workload
    return Scenario.model_validate(tree)


def in_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Equal leading items."""
    n = 0
    while n < min(len(one), len(other)) and one[n] == other[n]:
        n += 1
    return n


# --- RK-02: wait where the prefix is, or compute it again -------------------------------------------------------------

RATE = 1000.0
"""Prompt tokens a second, as the router counts: a round number and no engine's."""
PREFIX, MORE, OTHERS, QUEUED = 100, 50, 101, 20
"""Prompts: of the session that comes back, what its tool then says, and of the two that keep the engines busy."""
REPLY, LONG_REPLY, TOOL_S = 8, 300, 0.25
EQUAL_AT = (PREFIX - QUEUED) / RATE
"""Seconds a turn in A at which d + queued/rate + suffix/rate = (prefix + suffix)/rate."""


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of (tokens in, tokens out, seconds with the tool) calls: one that comes back, one that takes the other engine
    and is gone by then, and one that is sent to the first engine and stays there."""
    given = [[(PREFIX, REPLY, TOOL_S), (MORE, REPLY, 0.0)], [(OTHERS, 1, 0.0)], [(QUEUED, LONG_REPLY, 0.0)]]
    lines = [
        json.dumps(
            {
                "session_id": i,
                "arrival_time_ns": i,
                "sub_requests": [{"input_toks": a, "output_toks": b, "tool_duration_ns": s * 1e9} for a, b, s in calls],
            }
        )
        for i, calls in enumerate(given)
    ]
    path = tmp_path_factory.mktemp("sessions") / "sessions.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.mark.parametrize(("seconds_per_turn", "engine"), [(EQUAL_AT - 0.001, 0), (EQUAL_AT, 1), (EQUAL_AT + 0.001, 1)])
def test_rk_02_wait_at_the_cache_or_compute_it_again(
    rig: Any, sessions: str, seconds_per_turn: float, engine: int
) -> None:
    """A has the prefix of 100 tokens and a turn whose prompt was 20; B has neither. A iff wait_A + prefill(suffix) <
    wait_B + prefill(prefix + suffix), a tie where fewer turns are. What was chosen is what the engine then finds."""
    config = real(
        {"type": "sessions", "path": sessions, "max_response_length": 400},
        algorithm={"n_samples_per_prompt": 1, "rollout_batch_size": 3},
        rollout__routing={"type": "cost", "prefill_tokens_per_s": RATE, "decode_seconds_per_turn": seconds_per_turn},
        **ONE_BATCH,
    )
    run = carried_out(rig, config, trains=False)
    inside: dict[int, dict[int, int]] = {e: {} for e in ENGINES}
    """Engine -> trajectory -> tokens of its turn that are to be computed, as the router counts them."""
    prompts: dict[int, int] = {}
    sent: dict[tuple[int, int], int] = {}
    """(engine, trajectory) -> longest of its prompts that were sent there; sessions share nothing with each other."""
    for event, actions in run.records:
        if isinstance(event, said.TaskArrived):
            prompts[event.task] = event.prompt_tokens
        elif isinstance(event, said.TurnFinished):
            del inside[event.engine][event.trajectory]
        for a in actions:
            if isinstance(a, do.StartTurn):
                prompt = prompts[a.task] + a.turn * (REPLY + MORE)
                new = {e: prompt - sent.get((e, a.trajectory), 0) for e in ENGINES}
                wait = {e: len(inside[e]) * seconds_per_turn + sum(inside[e].values()) / RATE for e in ENGINES}
                best = min(ENGINES, key=lambda e: (round(wait[e] + new[e] / RATE, 9), len(inside[e]), e))
                assert (a.engine, a.why) == (best, "cost"), f"{a}: {wait}, {new}"
                inside[best][a.trajectory] = new[best]
                sent[best, a.trajectory] = prompt
    by_prompt = {e.prompt_tokens: e for e in run.ends}
    first, other, long = by_prompt[PREFIX], by_prompt[OTHERS], by_prompt[QUEUED]
    back = by_prompt[PREFIX + REPLY + MORE]
    assert [e.engine for e in (first, other, long)] == [0, 1, 0]
    back_t = next(t for t, a in every(run.records, do.StartTurn) if a.turn == 1)
    assert other.t < back_t < long.t, "A was busy when the session came back, and B was not"
    assert back.engine == engine
    ids = {(e.trajectory, e.turn): ids for e, ids in run.turns}
    elsewhere = in_common(ids[back.trajectory, 1], ids[other.trajectory, 0])
    assert back.cached_tokens == (PREFIX + REPLY - 1 if engine == 0 else elsewhere)


# --- RK-09: a prefix that everybody begins with -----------------------------------------------------------------------

CROWD, HOT, SLOTS = 40, 64, 16
"""Prompts sent at once, tokens that all begin with, and the requests that an engine of the rig runs at once."""


def crowd(routing: dict[str, Any]) -> Scenario:
    return real(
        {
            "shared_prefix_tokens": HOT,
            "prompt": fixed(20),
            "reply": {"type": "uniform", "low": 8, "high": 24},
            "max_response_length": 32,
        },
        algorithm={"n_samples_per_prompt": 1, "rollout_batch_size": CROWD},
        rollout__routing=routing,
        **ONE_BATCH,
    )


def waited_for(run: RealRun) -> list[int]:
    """Of each turn: how many of its engine ended between its dispatch and the engine's beginning with it."""
    sent = {(a.trajectory, a.turn): t for t, a in every(run.records, do.StartTurn)}
    return [
        sum(other.engine == e.engine and sent[e.trajectory, e.turn] < other.t <= e.started_t for other in run.ends)
        for e in run.ends
    ]


def test_rk_09_affinity_without_the_queue_loses_on_a_hot_prefix(rig: Any) -> None:
    """By the cache alone all 40 go where the first one went, and 24 of them wait for a slot there; by cost they go to
    both engines. Either way, who begins after another one has ended there finds the prefix."""
    affinity = carried_out(rig, crowd({"type": "cache_aware", "cache_threshold": 0.0, "balance_abs_threshold": 10_000}))
    cost = carried_out(rig, crowd({"type": "cost", "prefill_tokens_per_s": 2e4, "decode_seconds_per_turn": 0.01}))
    engines = [Counter(e.engine for e in run.ends) for run in (affinity, cost)]
    assert list(engines[0].values()) == [CROWD], "where the prefix is, and nowhere else"
    assert sorted(engines[1]) == [0, 1] and abs(engines[1][0] - engines[1][1]) <= 2, "a turn costs more than the prefix"
    p99 = [float(np.percentile(waited_for(run), 99)) for run in (affinity, cost)]
    assert p99[0] > (CROWD - SLOTS) / 2, "turns wait for others to end"
    assert p99[1] < 0.5 * p99[0]
    for run in (affinity, cost):
        first_end = {e: min(x.t for x in run.ends if x.engine == e) for e in {x.engine for x in run.ends}}
        later = [e for e in run.ends if e.started_t > first_end[e.engine]]
        assert all(e.cached_tokens >= HOT for e in later)


# --- RK-10: SGLang's cache_aware --------------------------------------------------------------------------------------

SHARED, TASKS, MEMBERS, TURNS = 16, 12, 2, 3


@dataclass
class Sent:
    """A prompt that was sent to an engine."""

    engine: int
    trajectory: int
    turn: int
    blocks: tuple[int, ...]
    tokens: int


def match(of: Sent, held: Sent, block: int, task_tokens: int) -> int:
    """Leading tokens of a prompt that another one has in common with it: the blocks that both tasks begin with, and all
    of an earlier turn's prompt of the same trajectory."""
    if held.trajectory == of.trajectory:
        return held.tokens
    return min(in_common(of.blocks, held.blocks) * block, task_tokens)


@pytest.mark.parametrize("threshold", [0.5, 0.05])
def test_rk_10_every_choice_of_cache_aware_follows_its_rule(rig: Any, threshold: float) -> None:
    """Loads and prompts counted from the run: imbalanced -> shortest queue; else a match above the threshold -> the
    engine that had it first; else the least loaded. Limits so low that a run of 24 crosses them. At the lower threshold
    the system prompt alone is a match."""
    limit, ratio = 3, 1.2
    config = real(
        {
            "shared_prefix_tokens": SHARED,
            "prompt": {"type": "uniform", "low": 60, "high": 120},
            "reply": {"type": "uniform", "low": 4, "high": 16},
            "observation": fixed(5),
            "turns": fixed(TURNS),
            "max_response_length": 16,
            "tool_time": {"type": "exponential", "mean_s": 0.05},
        },
        algorithm={"n_samples_per_prompt": MEMBERS, "rollout_batch_size": TASKS},
        rollout__routing={
            "type": "cache_aware",
            "balance_abs_threshold": limit,
            "balance_rel_threshold": ratio,
            "cache_threshold": threshold,
        },
        **ONE_BATCH,
    )
    run = carried_out(rig, config, trains=False)
    prompt_tokens = {(e.trajectory, e.turn): e.prompt_tokens for e in run.ends}
    tasks = {e.task: e for _, e in every(run.records, said.TaskArrived)}
    load = dict.fromkeys(ENGINES, 0)
    history: list[Sent] = []
    reasons: Counter[str] = Counter()
    for event, actions in run.records:
        if isinstance(event, said.TurnFinished):
            load[event.engine] -= 1
        for a in actions:
            if not isinstance(a, do.StartTurn):
                continue
            task = tasks[a.task]
            mine = Sent(a.engine, a.trajectory, a.turn, task.blocks, prompt_tokens[a.trajectory, a.turn])
            matches = [(match(mine, held, task.block_tokens, task.prompt_tokens), held.engine) for held in history]
            longest = max((n for n, _ in matches), default=0)
            least = min(ENGINES, key=lambda e: (load[e], e))
            most = max(load.values())
            if most - load[least] > limit and most > ratio * load[least]:
                expected = ("shortest_queue", least)
            elif longest / mine.tokens > threshold:
                expected = ("prefix_match", next(engine for n, engine in matches if n == longest))
            else:
                expected = ("least_load", least)
            assert (a.why, a.engine) == expected, f"{a}: {load}, {longest} of {mine.tokens}"
            reasons[a.why] += 1
            load[a.engine] += 1
            history.append(mine)
    assert reasons["prefix_match"] and reasons["least_load"]
    assert reasons["shortest_queue"] or threshold == 0.5, "one prompt for all makes one queue long"
    was = {(e.trajectory, e.turn): e for e in run.ends}
    for (trajectory, turn), e in was.items():
        before = was.get((trajectory, turn - 1))
        if before is not None and before.engine == e.engine:
            assert e.cached_tokens >= before.prompt_tokens + before.output_tokens - 1, "it was there"


# --- RK-06: whose log-probabilities are recorded ----------------------------------------------------------------------


def test_rk_06_recorded_log_probs_are_those_of_the_target(rig: Any) -> None:
    """Without drafts, which no real engine verifies here. Of the first batch every token's is what an independent
    forward pass of the start model gives; of both batches, what the trainer computes with the weights that generated
    it."""
    import torch
    from transformers import AutoModelForCausalLM

    config = real(
        {"reply": {"type": "uniform", "low": 8, "high": 24}, "max_response_length": 24},
        algorithm={"n_samples_per_prompt": 2, "rollout_batch_size": 2, "recompute_old_log_probs": True},
        run__num_rollout=2,
    )
    run = carried_out(rig, config)
    for engine in rig.deployment.engines:
        assert rig.wait(engine.client.get("/server_info"))["speculative_algorithm"] is None
    model = AutoModelForCausalLM.from_pretrained(
        rig.deployment.model.path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    versions: Counter[int] = Counter()
    for c in run.conversations.values():
        ((version, start, end),) = c.spans
        assert (start, end) == (0, len(c.log_probs)) and all(c.mask)
        versions[version] += 1
        assert np.abs(np.array(c.log_probs) - c.old_log_probs).max() < 1e-3
        if version == 0:
            with torch.no_grad():
                of_all = torch.log_softmax(model(torch.tensor([c.ids])).logits[0], dim=-1)
            where = np.arange(c.prompt_tokens - 1, len(c.ids) - 1)
            independent = of_all[where, c.ids[c.prompt_tokens :]].numpy()
            assert np.abs(np.array(c.log_probs) - independent).max() < 1e-3
    assert versions == {0: 4, 1: 4}


# --- RK-07: what each saving saves ------------------------------------------------------------------------------------


def ablated(rig: Any, monkeypatch: pytest.MonkeyPatch, config: Scenario, changes: dict[str, Any]) -> RealRun:
    """A run with one saving switched off. `disable_radix_cache` is an option that engines are started with; on engines
    that run, a namespace for each request does the same: nobody finds what another has computed."""
    tree = config.model_dump(mode="json")
    if "rollout.concurrency" in changes:
        tree["rollout"]["concurrency"] = changes["rollout.concurrency"]
    with monkeypatch.context() as patch:
        if changes.get("rollout.engine.disable_radix_cache"):
            for handle in rig.deployment.engines:
                alone(patch, handle.client)
        return carried_out(rig, Scenario.model_validate(tree))


def alone(patch: pytest.MonkeyPatch, client: Any) -> None:
    generate = client.generate

    async def unshared(*, rid: str, **request: Any) -> Any:
        return await generate(rid=rid, **(request | {"extra_key": rid}))

    patch.setattr(client, "generate", unshared)


def hand_count(run: RealRun) -> dict[str, float]:
    """Mean seconds of a trajectory in queues, prefill and decoding, from the events alone. Nothing pauses in a run of
    one batch, so what is neither of the two nor a tool's is a wait: for a slot, or in the engine."""
    n = len({e.trajectory for e in run.ends})
    prefill = sum(e.first_token_t - e.started_t for e in run.ends)
    decode = sum(e.t - e.first_token_t for e in run.ends)
    asked = {(a.trajectory, a.turn): t for t, a in every(run.records, do.StartTurn)}
    in_engines = sum(e.started_t - asked[e.trajectory, e.turn] for e in run.ends)
    return {"prefill": prefill / n, "decode": decode / n, "queue": (in_engines + sum(waits_for_a_slot(run))) / n}


def refills(run: RealRun) -> int:
    """Turns that were sent to an engine where another one had ended while others went on."""
    inside = dict.fromkeys(ENGINES, 0)
    freed = dict.fromkeys(ENGINES, False)
    count = 0
    for event, actions in run.records:
        if isinstance(event, said.TurnFinished):
            inside[event.engine] -= 1
            freed[event.engine] = inside[event.engine] > 0
        for a in actions:
            if isinstance(a, do.StartTurn):
                count += freed[a.engine]
                inside[a.engine] += 1
    return count


def waits_for_a_slot(run: RealRun) -> list[float]:
    """Of turns that were not sent when their trajectory was ready for them: seconds until they were."""
    drawn = {e.task: t for t, e in every(run.records, said.TaskArrived)}
    answered: dict[int, float] = {}
    waits = []
    for event, actions in run.records:
        if isinstance(event, said.ToolFinished):
            answered[event.trajectory] = event.t
        for a in actions:
            if isinstance(a, do.StartTurn):
                ready = answered[a.trajectory] if a.turn else drawn[a.task]
                waits += [event.t - ready] if event.t > ready else []
    return waits


def test_rk_07_prefix_reuse_and_slots_save_different_things(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ablation's own switches, one at a time. Without reuse every prompt token is computed, and freed slots are
    taken as before; with static batches none is taken, and prefixes are found. The report puts each turn's time where
    the run's events have it."""
    config = real(
        {
            "prompt": fixed(200),
            "reply": {"type": "uniform", "low": 4, "high": 40},
            "observation": fixed(20),
            "turns": fixed(3),
            "max_response_length": 40,
            "tool_time": {"type": "fixed", "seconds": 0.02},
        },
        algorithm={"n_samples_per_prompt": 2, "rollout_batch_size": 6},
        rollout__routing={"type": "session_affinity"},
        **ONE_BATCH,
    )
    found = {s.saving: s for s in switches(config)}
    assert set(found) == {"prefix reuse", "slot filling"}
    on = carried_out(rig, config)
    off = {name: ablated(rig, monkeypatch, config, dict(s.changes)) for name, s in found.items()}
    runs = {"all": on, **off}
    prompts = {name: sum(e.prompt_tokens for e in run.ends) for name, run in runs.items()}
    computed = {name: prompts[name] - sum(e.cached_tokens for e in run.ends) for name, run in runs.items()}
    tokens = {name: sum(e.output_tokens for e in run.ends) for name, run in runs.items()}
    filled = {name: refills(run) for name, run in runs.items()}
    assert len(set(prompts.values())) == len(set(tokens.values())) == 1, "the same work"
    assert computed["prefix reuse"] == prompts["all"] > 2 * computed["all"]
    assert computed["slot filling"] < computed["prefix reuse"]
    assert filled["slot filling"] == 0 < filled["all"] and filled["prefix reuse"] > 0
    by_hand = {name: hand_count(run) for name, run in runs.items()}
    for name, switch in found.items():
        saving = saved(switch, runs[name].summary, on.summary)
        assert saving.trajectory_s == pytest.approx(sum(saving.parts.values()))
        for part, seconds in by_hand[name].items():
            assert saving.parts[part] == pytest.approx(seconds - by_hand["all"][part], abs=1e-6), part
    assert runs["prefix reuse"].summary.kv.cached_tokens == 0 < runs["slot filling"].summary.kv.cached_tokens
