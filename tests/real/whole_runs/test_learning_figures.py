"""What a run's folder says of its updates, and rewards from a model in a whole run."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from real.run import run_on
from testbed.core import events as said
from testbed.metrics.files import read_summary
from testbed.scenario import Scenario
from tests.support.real_rig import for_real
from tests.support.scenarios import scenario


def configured(real: dict[str, Any] | None = None, **changes: Any) -> Scenario:
    config = for_real(scenario(run__num_rollout=2, algorithm__num_steps_per_rollout=2, **changes))
    return config.model_copy(update={"real": config.real.model_copy(update=real or {})})


def run_into(rig: Any, config: Scenario, folder: Path, observers: Any = ()) -> None:
    async def run() -> None:
        await rig.deployment.reset(config)
        await run_on(rig.deployment, config, folder, observers=observers)

    rig.wait(run())


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_qm_03_and_rp_11_a_folder_keeps_both_differences_and_what_actor_and_critic_did(
    rig: Any, tmp_path: Path
) -> None:
    config = configured(algorithm__advantage="critic", algorithm__recompute_old_log_probs=True)
    run_into(rig, config, tmp_path)
    updates = lines(tmp_path / "training.jsonl")
    assert [(u["batch"], u["update"]) for u in updates] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    summary = read_summary(tmp_path / "summary.json")
    assert [s.batch for s in summary.steps] == [0, 1]
    for step in summary.steps:
        mine = [u for u in updates if u["batch"] == step.batch]
        for name, of in (
            ("engine_kl", lambda u: u["stats"]["engine_kl"]),
            ("update_kl", lambda u: u["stats"]["update_kl"]),
            ("grad_norm", lambda u: u["stats"]["grad_norm"]),
            ("value_loss", lambda u: u["critic"]["loss"]),
            ("explained_variance", lambda u: u["critic"]["explained_variance"]),
        ):
            assert step.learning[name] == pytest.approx(sum(map(of, mine)) / 2), name
        both = (("ratio", "ratio_counts"), ("engine_ratio", "engine_ratio_counts"))
        for name, field in both:
            total = Counter[int]()
            for u in mine:
                total.update({int(k): n for k, n in u["stats"][field].items()})
            assert step.ratios[name] == total and sum(total.values()) == sum(u["stats"]["tokens"] for u in mine)
        assert mine[0]["stats"]["ratio_counts"].keys() == {"0"}, "no update yet, one engine and trainer in FP32"
        assert not {"mismatch_kl", "reference_kl", "truncated_share"} & set(step.learning), "not asked for"
    assert summary.clip == pytest.approx((0.8, 1.2))
    assert (summary.engine_precision, summary.training_precision) == ("fp32", "fp32")
    assert summary.engine_weight_bytes == 4 * rig.deployment.model.parameters, "fp32"


def test_lm_03_a_reward_model_rewards_a_whole_run(rig: Any, tmp_path: Path) -> None:
    """Each reward is the frozen model's number for exactly the ids that are trained, also for what ends while the
    trainer works."""
    from transformers import AutoModelForTokenClassification

    asked: list[tuple[list[int], float]] = []
    told: list[float] = []

    def observe(event: said.Event, actions: Any) -> None:
        if isinstance(event, said.SignalReady) and event.signal == "reward":
            told.extend(event.values)

    trainer_type = type(rig.deployment.trainer)
    original = trainer_type.rewards

    async def noted(self: Any, records: Any) -> list[float]:
        found: list[float] = await original(self, records)
        asked.extend((r.token_ids.tolist(), x) for r, x in zip(records, found, strict=True))
        return found

    config = configured({"reward_model": str(rig.reward_model)}, rollout__admission={"type": "one_step_ahead"})
    trainer_type.rewards = noted  # type: ignore[method-assign]
    try:
        run_into(rig, config, tmp_path, [observe])
    finally:
        trainer_type.rewards = original  # type: ignore[method-assign]
    assert len(asked) >= 2 * config.algorithm.trajectories_per_batch
    assert sorted(told) == sorted(x for _, x in asked) and len(set(told)) > 1
    model = AutoModelForTokenClassification.from_pretrained(
        rig.reward_model, num_labels=1, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for ids, reward in asked[:12]:
            assert reward == pytest.approx(model(input_ids=torch.tensor([ids])).logits[0, -1, 0].item(), abs=1e-3)
    assert all(u["reward_mean"] not in (0.0, 1.0) for u in lines(tmp_path / "training.jsonl"))
