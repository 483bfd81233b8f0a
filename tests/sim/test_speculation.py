"""Speculative decoding and MTP: tokens per verification, what a token costs, and what stays as it was."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sim.costs.analytic import AnalyticCostModel
from sim.costs.linear import LinearCostModel
from sim.costs.speculation import SpeculativeCosts, mean_tokens, tokens_per_verification
from testbed.core import events as said
from testbed.scenario.catalogue import gpu_spec, model_preset
from testbed.scenario.rollout import Speculative
from testbed.scenario.run import AnalyticCosts, LinearCosts
from tests.support.simulated import LINEAR, STEP, Run, fixed, linear_run, split

H100 = gpu_spec("H100")


@pytest.mark.parametrize("accept", [0.0, 0.3, 0.675, 0.9])
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_rk_05_expected_tokens_of_a_verification(accept: float, steps: int) -> None:
    """Against 100,000 verifications drawn one by one: drafts are accepted until the first that is not, and the target
    adds a token of its own. Standard error below steps / sqrt(100,000); 5 of them."""
    rng = random.Random(0)
    total = 0
    for _ in range(100_000):
        kept = 0
        while kept < steps and rng.random() < accept:
            kept += 1
        total += kept + 1
    expected = (1 - accept ** (steps + 1)) / (1 - accept)
    assert tokens_per_verification(accept, steps) == pytest.approx(expected)
    assert total / 100_000 == pytest.approx(expected, abs=5 * steps / 100_000**0.5)


def test_rk_05_published_accept_lengths_and_their_rates() -> None:
    """SGLang's DeepSeek-V3: 2.18 tokens of 2 drafts and 2.44 of 3; solved for the rate: 0.696 and 0.675."""
    assert tokens_per_verification(0.696, 2) == pytest.approx(2.18, abs=0.005)
    assert tokens_per_verification(0.675, 3) == pytest.approx(2.44, abs=0.005)


@pytest.mark.parametrize(("steps", "share", "rate"), [(1, 0.0, 0.5), (3, 0.1, 0.7), (5, 0.25, 0.9)])
def test_rk_05_speed_up_is_leviathans_while_verification_is_free(steps: int, share: float, rate: float) -> None:
    """A step that costs the same for any number of tokens: (1 - a^(g + 1)) / ((1 - a) (1 + g c))."""
    target = LinearCostModel(LinearCosts(base_s=0.01, per_sequence_s=0.0))
    s = Speculative(speculative_num_steps=steps, draft_step_share=share, accept_rate=rate)
    gain = target.decode_time(8, 8000) / SpeculativeCosts(target, s).decode_time(8, 8000)
    assert gain == pytest.approx((1 - rate ** (steps + 1)) / ((1 - rate) * (1 + steps * share)))


def test_rk_05_a_token_costs_its_part_of_drafts_and_verification() -> None:
    """By hand: 8 sequences of 1,000 tokens, 2 drafts. Verification: 5 ms + 24 x 50 us + 8,000 x 100 ns = 7 ms; a draft:
    0.1 x (5 ms + 8 x 50 us + 0.8 ms) = 0.62 ms; 2.18 tokens."""
    target = LinearCostModel(LinearCosts(base_s=0.005, per_sequence_s=5e-5, per_context_token_s=1e-7))
    costs = SpeculativeCosts(target, Speculative(speculative_num_steps=2, draft_step_share=0.1, accept_length=2.18))
    assert costs.decode_time(8, 8000) == pytest.approx((0.007 + 2 * 0.00062) / 2.18)


def test_rk_05_the_gain_shrinks_as_the_batch_fills() -> None:
    """Verification stops being free where the target's step becomes bound by compute; then drafts cost more than they
    bring."""
    target = AnalyticCostModel(AnalyticCosts(), model_preset("Qwen3-8B"), H100, 1)
    costs = SpeculativeCosts(target, Speculative(accept_rate=0.6, draft_step_share=0.05))
    gains = [target.decode_time(n, 500 * n) / costs.decode_time(n, 500 * n) for n in (1, 16, 64, 256, 1024)]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 1.7 and gains[-1] < 1


@pytest.mark.parametrize("given", [{"accept_rate": 0.8}, {"accept_length": 2.9}])
def test_drafts_age_with_the_versions_published(given: dict[str, float]) -> None:
    """Each version costs 10 % of the accepted drafts (of their chance, where that is given)."""
    s = Speculative(accept_decay_per_version=0.1, **given)
    target = LinearCostModel(LinearCosts())
    costs = SpeculativeCosts(target, s)
    for version in (0, 1, 5):
        kept = 0.9**version
        if "accept_rate" in given:
            rate = 0.8 * kept
            expected = sum(rate**i for i in range(4))
        else:
            expected = 1 + 1.9 * kept
        assert mean_tokens(s, version) == pytest.approx(expected)
        aged = costs.at_version(version)
        assert aged.decode_time(4, 400) == pytest.approx(costs.decode_time(4, 400) * mean_tokens(s) / expected)
        assert costs.at_version(version) is aged


def runs(**speculative: Any) -> Run:
    return linear_run(
        placement=split(2, 1),
        algorithm={"n_samples_per_prompt": 4, "rollout_batch_size": 4},
        rollout__admission={"type": "one_step_ahead"},
        workload__reply={"type": "uniform", "low": 20, "high": 200},
        rollout__engine__disable_overlap_schedule=True,
        **({"rollout__engine__speculative": speculative} if speculative else {}),
        run__num_rollout=4,
    )


def test_rk_06_drafts_change_times_and_nothing_that_is_recorded() -> None:
    """Tokens, versions and rewards of every trajectory are the target's: those of a run without drafts, whose weights
    change at the same batches."""

    def recorded(r: Run) -> list[Any]:
        return sorted((e.trajectory, e.output_tokens, e.finish_reason) for _, e, _ in r.turns())

    def rewards(r: Run) -> dict[int, float]:
        return {t: v for _, e in r.of(said.SignalReady) for t, v in zip(e.trajectories, e.values, strict=True)}

    plain, drafted = runs(), runs(accept_length=3.0, draft_step_share=0.0, accept_decay_per_version=0.2)
    assert recorded(plain) == recorded(drafted) and rewards(plain) == rewards(drafted)
    assert plain.summary.trajectory.decode > 2 * drafted.summary.trajectory.decode  # 3 tokens, then 2.6, 2.28, ...
    for r in (plain, drafted):
        r.checked()  # spans partition the output, and name versions that were deployed


def test_rk_06_drafts_that_age_slow_the_run_down_with_every_version() -> None:
    """Alone in its engine a sequence of 101 tokens decodes in 100 x 10 ms / E(version)."""
    r = linear_run(
        placement=split(1, 1),
        algorithm={"n_samples_per_prompt": 1, "rollout_batch_size": 1},
        workload__reply=fixed(101),
        rollout__engine={
            "disable_overlap_schedule": True,
            "speculative": {"accept_length": 3.0, "draft_step_share": 0.0, "accept_decay_per_version": 0.5},
        },
        run__num_rollout=4,
    )
    for _, e, _ in r.turns():
        ((version, _, _),) = e.spans
        assert e.t - e.first_token_t == pytest.approx(100 * STEP / (1 + 2 * 0.5**version))


def test_rk_07_reuse_slots_and_drafts_save_different_times() -> None:
    """Switched one at a time: without reuse prefill grows, without slots queueing, without drafts decode, by what each
    is for and by nothing else."""
    changes: dict[str, Any] = {
        "placement": split(2, 1),
        "algorithm": {"n_samples_per_prompt": 4, "rollout_batch_size": 4},
        "workload__prompt": fixed(1000),
        "workload__turns": fixed(3),
        "workload__observation": fixed(100),
        "rollout__routing": {"type": "session_affinity"},
        "rollout__engine__disable_overlap_schedule": True,
        "rollout__engine__speculative": {"accept_length": 2.0, "draft_step_share": 0.0},
        "simulation__engine_costs": {**LINEAR, "prefill_base_s": 0.0, "prefill_per_token_s": 1e-5},
        "run__num_rollout": 3,
    }
    every = linear_run(**changes).summary.trajectory
    no_reuse = linear_run(**changes, rollout__engine__disable_radix_cache=True).summary.trajectory
    no_slots = linear_run(**changes, rollout__engine__max_running_requests=1).summary.trajectory
    no_drafts = linear_run(**{**changes, "rollout__engine__speculative": None}).summary.trajectory
    assert no_reuse.prefill > 2 * every.prefill
    assert no_slots.queue > 10 * every.queue and no_slots.prefill <= every.prefill
    assert no_drafts.prefill == pytest.approx(every.prefill, rel=0.05)
    # slots that nobody interrupts decode 3 x 49 steps, at half the price with drafts
    assert no_slots.decode == pytest.approx(3 * 49 * STEP / 2)
    assert no_drafts.decode > 1.8 * every.decode
