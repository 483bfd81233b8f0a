"""A trainer rank whose sharded model runs on the values that engines hold, before and after an update."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from real.errors import RealError
from real.learning.log_probs import chosen_log_probs
from real.records import Record
from real.settings import served_dtype, trainer_options
from real.trainer.options import TrainerOptions
from real.trainer.rank import TrainerRank
from real.trainer.trainer import with_advantages
from tests.real.learning.test_quantisation_forward import built, written_over
from tests.support.scenarios import scenario

IDS = np.array([5, 9, 60, 3, 3, 41, 7, 22, 0, 17, 58, 30], np.int32)


def record(trajectory: int, ids: np.ndarray, reward: float) -> Record:
    response = len(ids) - 4
    return Record(
        trajectory=trajectory,
        group=0,
        task=0,
        prompt_tokens=4,
        token_ids=ids,
        loss_mask=np.ones(response, bool),
        generation_log_probs=np.full(response, -4, np.float32),
        spans=((0, 0, response),),
        reward=reward,
        finish_reason="stop",
    ).check()


def as_an_engine_scores(rank: TrainerRank, rule: str) -> torch.Tensor:
    """log p of the response by a plain BF16 model that got the trainer's weights and requantised them."""
    engine = AutoModelForCausalLM.from_config(rank.model.config, attn_implementation="sdpa").eval()
    for parameter in engine.parameters():  # not the rotary frequencies, which stay float32 in a mixed-precision pass
        parameter.data = parameter.data.to(torch.bfloat16)
    engine.load_state_dict(rank.full_state() or {})
    ids = torch.from_numpy(IDS).long()
    with torch.no_grad():
        logits = written_over(engine, rule)(input_ids=ids[None]).logits[0]
    return chosen_log_probs(logits[3:-1], ids[4:])


@pytest.mark.parametrize("rule", ["fp8", "nvfp4"])
def test_qm_06_a_sharded_bf16_trainer_scores_as_its_engines_do_and_learns(rule: str, tmp_path: Path) -> None:
    built("dense").save_pretrained(tmp_path)
    rank = TrainerRank(0, 1, TrainerOptions(str(tmp_path), dtype="bfloat16", lr=1e-2, max_tokens_per_gpu=len(IDS)))
    rank.connect(*rank.address())
    records = [record(0, IDS, 1.0), record(1, IDS[::-1].copy(), 0.0)]
    before = rank.full_state() or {}
    plain = rank.log_probs(records)[0]
    rank = TrainerRank(0, 1, replace(rank.options, quantised=rule))
    rank.connect(*rank.address())
    scored = torch.from_numpy(rank.log_probs(records)[0])
    assert torch.equal(scored, as_an_engine_scores(rank, rule)) and not np.array_equal(scored.numpy(), plain)
    stats = rank.train_update(with_advantages(records, "population"), 0, 0)
    after = rank.full_state() or {}
    assert stats.grad_norm > 0 and after.keys() == before.keys()
    assert all(not torch.equal(after[name], before[name]) for name in after if "_proj" in name)
    assert torch.equal(torch.from_numpy(rank.log_probs(records)[0]), as_an_engine_scores(rank, rule))
    rank.shutdown()


def test_qm_06_only_the_actor_is_quantised_and_it_stays_so_over_a_checkpoint(tmp_path: Path) -> None:
    built("dense").save_pretrained(tmp_path / "model")
    options = TrainerOptions(str(tmp_path / "model"), dtype="bfloat16", max_tokens_per_gpu=64, quantised="nvfp4")
    rank = TrainerRank(0, 1, options)
    rank.connect(*rank.address())
    records = [record(0, IDS, 1.0)]
    [actor], [reference] = rank.log_probs(records), rank.log_probs(records, "reference")
    plain = TrainerRank(0, 1, replace(options, quantised=None))
    plain.connect(*plain.address())
    assert np.array_equal(reference, plain.log_probs(records)[0]) and not np.array_equal(actor, reference)
    rank.save(tmp_path / "saved")
    rank.restore(tmp_path / "saved")
    assert np.array_equal(rank.log_probs(records)[0], actor)
    wrong = TrainerRank(0, 1, replace(options, quantised="fp6"))
    with pytest.raises(RealError, match="no rule 'fp6'; there are fp8"):
        wrong.connect(*wrong.address())


@pytest.mark.backend("CORE")
@pytest.mark.parametrize(
    ("engine", "training", "sent", "dtype", "quantised"),
    [
        ("fp32", "fp32", "float32", "float32", None),
        ("bf16", "bf16", "bfloat16", "bfloat16", None),
        ("fp8", "bf16", "bfloat16", "bfloat16", None),
        ("fp8", "fp8", "bfloat16", "bfloat16", "fp8"),
        ("int4", "int4", "bfloat16", "bfloat16", "int4"),
    ],
)
def test_qm_07_a_scenarios_words_say_what_is_sent_served_and_computed_with(
    engine: str, training: str, sent: str, dtype: str, quantised: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = scenario(
        rollout__engine={"weight_precision": engine},
        training={"precision": training},
        placement__rollout_num_gpus_per_engine=2,
    )
    options = trainer_options(config, tmp_path, tmp_path, "cpu")
    assert served_dtype(config) == sent
    assert (options.dtype, options.quantised, options.engine_tp_size) == (dtype, quantised, 2)
