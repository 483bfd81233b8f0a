"""What each of the three savings is to the core: reused prefixes save input computation and no decoding (RK-03), drafts
are no policy of their own (RK-06), and filled slots save waiting and nothing else (RK-07)."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import pytest

from testbed.commands.ablation import EVERY, PARTS, saved, switches
from testbed.core import actions as do
from testbed.core.core import Core
from testbed.metrics.run import RunMetrics
from testbed.metrics.summary import RunSummary
from testbed.policies.routing import RouteRequest, router
from testbed.scenario import Scenario
from testbed.scenario.layout import layout_of
from testbed.scenario.routing import CostBased
from tests.support.scenarios import scenario
from tests.support.scripted import Scripted

PREFIX, SUFFIX, RATE, TURN_S = 3072, 1024, 1024.0, 0.5
"""Tokens, prefill tokens a second, seconds of decoding that a turn costs those behind it."""


@pytest.mark.parametrize("known", [0, 1024, 3072])
def test_rk_03_reuse_takes_prefill_from_a_queue_and_no_decoding(known: int) -> None:
    """Engine 0 runs a prompt of 4,096 tokens of which it had `known`, engine 1 one of which it had none. A stranger
    waits (4,096 - known) / rate + d for the first and 4,096 / rate + d for the second: d is the same, so it takes
    known / rate / d further turns in engine 0, empty ones, before the stranger goes to engine 1."""
    policy = router(CostBased(prefill_tokens_per_s=RATE, decode_seconds_per_turn=TURN_S), 2, np.random.default_rng(0))
    blocks, prompt = (1, 2, 3), PREFIX + SUFFIX
    if known:
        policy.started(0, RouteRequest(0, 0, 0, 0, known, blocks[: known // 1024], 1024))
        policy.finished(0)
    policy.started(0, RouteRequest(1, 0, 0, 0, prompt, (*blocks, 9), 1024))
    policy.started(1, RouteRequest(2, 1, 0, 1, prompt, (4, 5, 6, 7), 1024))
    stranger = RouteRequest(3, 2, 0, 2, 1000, (8,), 1000)
    equal_at = known / RATE / TURN_S
    for more in range(9):
        # at equal times the engine with fewer turns, then the lower index
        first = more < equal_at or (more == equal_at and more == 0)
        assert policy.choose(stranger) == (0 if first else 1), f"{more} turns more"
        policy.started(0, RouteRequest(100 + more, 100 + more, 0, 100 + more, 0))


def tools(**changes: Any) -> Scenario:
    return scenario(
        rollout__admission={"type": "bounded", "max_head_offpolicyness": 1},
        rollout__routing={"type": "cost", "prefill_tokens_per_s": RATE, "decode_seconds_per_turn": TURN_S},
        weights__transition={"pause_generation_mode": "in_place", "kv": "salt_by_version"},
        run__num_rollout=4,
        **changes,
    )


def test_rk_06_a_draft_is_no_policy_to_the_core() -> None:
    """With drafts and without, the same events get the same actions: no engine, role, version or publication more, and
    what is trained on names the versions of the target alone."""
    plain = tools()
    drafted = tools(rollout__engine={"speculative": {"accept_length": 3.0, "accept_decay_per_version": 0.2}})
    run = Scripted(plain, turns=3, turn=lambda a: 4.0 + a.trajectory * 7 % 11).run()
    core = Core(drafted)
    assert layout_of(drafted) == layout_of(plain)
    assert [core.handle(e) for e, _ in run.records] == [actions for _, actions in run.records]
    deployed = {0} | {a.version for _, a in run.of(do.ResumeEngine)}
    trained = [x for _, a in run.of(do.Train) for x in a.experiences]
    assert trained and {v for x in trained for v in (x.oldest_version, x.newest_version)} <= deployed
    assert deployed == {0, 1, 2, 3, 4}


SLOTS = 2
SECONDS = (2.0, 9.0, 4.0, 7.0, 3.0, 5.0)
"""Of the turns of one batch; in one engine, whatever runs beside them."""


def waits(static: bool) -> list[float]:
    """Seconds until each turn gets a slot: when one is free, or when all are."""
    if static:
        batches = [SECONDS[i : i + SLOTS] for i in range(0, len(SECONDS), SLOTS)]
        return [sum(max(b) for b in batches[: i // SLOTS]) for i in range(len(SECONDS))]
    free, found = [0.0] * SLOTS, []
    for seconds in SECONDS:
        found.append(heapq.heappop(free))
        heapq.heappush(free, found[-1] + seconds)
    return found


def summary(config: Scenario) -> RunSummary:
    run = Scripted(config, turn=lambda a: SECONDS[a.trajectory % len(SECONDS)], reward=0.0).run()
    metrics = RunMetrics(config, layout_of(config))
    for event, actions in run.records:
        metrics.observe(event, actions)
    return metrics.summary()


def test_rk_07_slot_filling_saves_waiting_and_nothing_else() -> None:
    """The only one of the three that the core carries out. Its switch changes when turns are sent, and the ablation
    puts all of the difference down to queueing."""
    config = scenario(
        algorithm={"n_samples_per_prompt": 1, "rollout_batch_size": len(SECONDS)},
        placement={"mode": "disaggregated", "rollout_num_gpus": 1, "actor_num_gpus": 1},
        rollout__concurrency={"type": "per_engine", "max_concurrent_per_engine": SLOTS},
        rollout__engine={"max_running_requests": SLOTS, "speculative": {"accept_length": 2.0}},
        run__num_rollout=2,
    )
    found = {s.saving: s for s in switches(config)}
    assert list(found) == ["prefix reuse", "slot filling", "speculation"]
    changed = {saving: set(s.changes) for saving, s in found.items()}
    assert all(a.isdisjoint(b) for one, a in changed.items() for other, b in changed.items() if one != other)
    slots = found["slot filling"]
    assert slots.against == EVERY
    tree = config.model_dump(mode="json")
    tree["rollout"]["concurrency"] = slots.changes["rollout.concurrency"]
    on, off = summary(config), summary(Scenario.model_validate(tree))
    difference = saved(slots, off, on)
    mean = sum(waits(static=True)) / len(SECONDS) - sum(waits(static=False)) / len(SECONDS)
    assert mean > 3.0
    assert difference.parts == pytest.approx({p: mean if p == "queue" else 0.0 for p in PARTS})
    assert difference.trajectory_s == pytest.approx(mean)
    ends = [max(w + s for w, s in zip(waits(static), SECONDS, strict=True)) for static in (True, False)]
    assert difference.step_s == pytest.approx(ends[0] - ends[1])
    assert on.waste.trained_tokens == off.waste.trained_tokens > 0
