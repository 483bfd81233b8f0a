"""One rank, in this process: passes over recorded tokens against transformers, one sequence at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from real.errors import RealError
from real.learning.options import LossOptions
from real.records import Record
from real.trainer.options import TrainerOptions
from real.trainer.rank import TrainerRank
from real.trainer.signals import with_advantages
from tests.real.trainer import plain
from tests.real.trainer.conftest import make_record, random_records


def connected(folder: Path, **options: object) -> TrainerRank:
    rank = TrainerRank(0, 1, TrainerOptions(str(folder), **options))  # type: ignore[arg-type]
    rank.connect(*rank.address())
    return rank


def ready(records: list[Record]) -> list[Record]:
    return with_advantages(records, "population")


@pytest.fixture(scope="module")
def scorer(dense_model: Path) -> Iterator[TrainerRank]:
    """A rank that no test trains."""
    rank = connected(dense_model, max_tokens_per_gpu=64)
    yield rank
    rank.shutdown()


# --- scoring ----------------------------------------------------------------------------------------------------------


def test_packed_log_probs_equal_one_by_one(scorer: TrainerRank, dense_model: Path) -> None:
    records = random_records(9)
    found = scorer.log_probs(records)
    model = plain.load(dense_model)
    for record, values in zip(records, found, strict=True):
        assert values.dtype == np.float32
        assert values == pytest.approx(plain.log_probs(model, record).detach().numpy(), abs=1e-5)


def test_log_probs_of_experts_packed(moe_model: Path) -> None:
    rank, model = connected(moe_model, max_tokens_per_gpu=64), plain.load(moe_model)
    records = random_records(6)
    for record, values in zip(records, rank.log_probs(records), strict=True):
        assert values == pytest.approx(plain.log_probs(model, record).detach().numpy(), abs=1e-5)


def test_log_probs_are_of_the_sampling_temperature(dense_model: Path) -> None:
    rank, (record, *_) = connected(dense_model, temperature=0.7), random_records(1)
    expected = plain.log_probs(plain.load(dense_model), record, temperature=0.7).detach().numpy()
    assert rank.log_probs([record])[0] == pytest.approx(expected, abs=1e-5)


def test_lm_06_one_causal_pass_is_three_separate_ones(scorer: TrainerRank) -> None:
    whole = make_record(0, [5, 6, 7, 8], 1, [True] * 3)
    found = scorer.log_probs([whole])[0]
    for end in (2, 3, 4):
        prefix = make_record(0, [5, 6, 7, 8][:end], end - 1, [True])
        assert scorer.log_probs([prefix])[0][0] == pytest.approx(found[end - 2], abs=1e-5)
    other_last = scorer.log_probs([make_record(0, [5, 6, 7, 99], 1, [True] * 3)])[0]
    assert other_last[:2] == pytest.approx(found[:2], abs=1e-6)
    assert other_last[2] != pytest.approx(found[2], abs=1e-3)


def test_er_06_scoring_leaves_generation_log_probs_alone(scorer: TrainerRank) -> None:
    records = random_records(4)
    before = [(r.generation_log_probs.copy(), r.token_ids.copy()) for r in records]
    for record, values in zip(records, scorer.log_probs(records), strict=True):
        record.old_log_probs = values
    for record, (generation, ids) in zip(records, before, strict=True):
        assert np.array_equal(record.generation_log_probs, generation)
        assert np.array_equal(record.token_ids, ids)
        assert not np.allclose(record.old_log_probs, generation)


def test_a_record_without_response_has_no_log_probs(scorer: TrainerRank) -> None:
    empty, other = make_record(0, [1, 2], 2, []), make_record(1, [1, 2, 3], 1, [True, True])
    assert [len(v) for v in scorer.log_probs([empty, other])] == [0, 2]
    assert scorer.log_probs([]) == []


def test_a_token_beyond_the_vocabulary_is_named(scorer: TrainerRank) -> None:
    with pytest.raises(RealError, match="trajectory 3 has token id 128; the model's vocabulary has 128"):
        scorer.log_probs([make_record(3, [1, 128], 1, [True])])


# --- updates ----------------------------------------------------------------------------------------------------------


def gradients(rank: TrainerRank, records: list[Record]) -> dict[str, torch.Tensor]:
    """Of one update, whole, before clipping (the optimizer's step is taken, at a learning rate of nothing)."""
    found: dict[str, torch.Tensor] = {}

    def keep(*_: object) -> None:
        for name, parameter in rank.model.named_parameters():
            assert parameter.grad is not None
            found[name] = parameter.grad.full_tensor().clone()  # type: ignore[attr-defined]

    hook = rank.optimizer.register_step_pre_hook(keep)
    rank.train_update(records, 0, 0)
    hook.remove()
    return found


STILL = {"lr": 1e-30, "max_grad_norm": 1e9}


def test_gradient_is_that_of_the_written_out_loss(dense_model: Path) -> None:
    records = random_records(6)
    model = plain.load(dense_model)
    loss = plain.grpo_loss(model, records, [-1, 1] * 3)
    loss.backward()
    rank = connected(dense_model, max_tokens_per_gpu=64, **STILL)
    stats = rank.train_update(ready(records), 4, 1)
    assert (stats.batch, stats.update) == (4, 1)
    assert stats.loss == pytest.approx(loss.item(), rel=1e-5)
    norm = torch.stack([p.grad.double().norm() for p in model.parameters() if p.grad is not None]).norm().item()
    assert stats.grad_norm == pytest.approx(norm, rel=1e-5)
    expected = {n: p.grad for n, p in model.named_parameters()}
    for name, gradient in gradients(rank, ready(records)).items():
        assert gradient.numpy() == pytest.approx(expected[name].numpy(), abs=1e-5 * norm)  # type: ignore[union-attr]


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_gradients_do_not_depend_on_the_micro_batches(dense_model: Path, aggregation: str) -> None:
    records = ready(random_records(8))
    loss = LossOptions(aggregation=aggregation)  # type: ignore[arg-type]
    one = connected(dense_model, max_tokens_per_gpu=10_000, loss=loss, **STILL)
    many = connected(dense_model, max_tokens_per_gpu=1, loss=loss, **STILL)
    whole, parts = gradients(one, records), gradients(many, records)
    assert one.train_update(records, 0, 0).micro_batches == 1
    assert many.train_update(records, 0, 0).micro_batches == 8
    largest = max(float(g.abs().max()) for g in whole.values())
    for name, gradient in whole.items():
        assert (gradient - parts[name]).abs().max().item() <= 1e-6 * largest, name


def test_er_05_masked_tokens_are_context_without_loss(dense_model: Path) -> None:
    mask = [True] * 3 + [False] * 2 + [True] * 3
    ids = [1, 2, 3, 4, 5, 60, 61, 8, 9, 10]
    tool = make_record(0, ids, 2, mask)
    changed = make_record(0, [*ids[:5], 70, *ids[6:]], 2, mask)
    rank = connected(dense_model, **STILL)
    before, after = rank.log_probs([tool, changed])
    assert after[:3] == pytest.approx(before[:3], abs=1e-6)
    assert np.abs(after[5:] - before[5:]).min() > 1e-4
    # The loss is that of the six actor tokens alone, whatever stands at the masked positions.
    other = make_record(1, [1, 2, 7, 7], 2, [True, True], group=0)
    stats = rank.train_update(ready([tool, other]), 0, 0)
    assert stats.tokens == 8
    assert stats.loss == pytest.approx(
        plain.grpo_loss(plain.load(dense_model), [tool, other], [-1, 1]).item(), rel=1e-5
    )


def test_lm_22_and_lm_04_an_update_moves_probabilities_and_draws_nothing(dense_model: Path) -> None:
    records = ready(random_records(4))
    rank = connected(dense_model, lr=1e-3)
    ids = [r.token_ids.copy() for r in records]
    before, rng = rank.log_probs(records), torch.get_rng_state()
    rank.train_update(records, 0, 0)
    after = rank.log_probs(records)
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(np.array_equal(r.token_ids, i) for r, i in zip(records, ids, strict=True))
    assert max(float(np.abs(a - b).max()) for a, b in zip(before, after, strict=True)) > 1e-3


def test_statistics_of_a_first_update(dense_model: Path) -> None:
    """With the trainer's own log-probs as generation log-probs there is no difference to see: ratio 1, KL 0."""
    rank = connected(dense_model, **STILL)
    records = random_records(4)
    for record, values in zip(records, rank.log_probs(records), strict=True):
        record.generation_log_probs = np.where(record.loss_mask, values, 0).astype(np.float32)
    stats = rank.train_update(ready(records), 0, 0)
    assert stats.mean_ratio == pytest.approx(1, abs=1e-5)
    assert (stats.clip_share, stats.reference_kl) == (0, 0)
    assert abs(stats.mismatch_kl) < 1e-6
    assert stats.tokens == sum(int(r.loss_mask.sum()) for r in records)
    assert stats.input_tokens == sum(len(r.token_ids) for r in records)
    assert stats.sequences == 4
    # An engine that is off by 0.1 everywhere: ratio e^-0.1, k3 of KL(generation || trainer) e^-0.1 - 1 + 0.1.
    for record in records:
        record.generation_log_probs = np.where(record.loss_mask, record.generation_log_probs + 0.1, 0).astype(
            np.float32
        )
    stats = rank.train_update(ready(records), 0, 0)
    assert stats.mean_ratio == pytest.approx(np.exp(-0.1), rel=1e-4)
    assert stats.mismatch_kl == pytest.approx(np.exp(-0.1) - 0.9, rel=1e-3)


def test_er_07_recomputed_denominator_ignores_the_engine(dense_model: Path) -> None:
    rank = connected(dense_model, loss=LossOptions(denominator="recomputed"), **STILL)
    records = ready(random_records(4))
    with pytest.raises(RealError, match="no old log-probs, which denominator recomputed needs"):
        rank.train_update(records, 0, 0)
    for record, values in zip(records, rank.log_probs(records), strict=True):
        record.old_log_probs = values
    assert rank.train_update(records, 0, 0).mean_ratio == pytest.approx(1, abs=1e-5)


def test_gradient_norm_is_clipped(dense_model: Path) -> None:
    """AdamW's first moment after one step is (1 - beta1) times the clipped gradient."""
    rank = connected(dense_model, max_grad_norm=0.01)
    stats = rank.train_update(ready(random_records(4)), 0, 0)
    assert stats.grad_norm > 0.1
    moments = [s["exp_avg"].full_tensor() for s in rank.optimizer.state.values()]
    assert torch.stack([m.norm() for m in moments]).norm().item() / 0.1 == pytest.approx(0.01, rel=1e-3)


def test_a_gradient_that_is_not_finite_changes_nothing(dense_model: Path) -> None:
    rank = connected(dense_model, lr=1e-3)
    records = ready(random_records(2))
    before = rank.full_state()
    records[0].extra["advantages"][0] = np.nan
    records[0].loss_mask[0] = True
    with pytest.raises(RealError, match=r"gradient norm nan in batch 7, update 0; weights are unchanged"):
        rank.train_update(records, 7, 0)
    after = rank.full_state()
    assert before is not None and after is not None
    assert all(torch.equal(after[n], w) for n, w in before.items())


def test_a_batch_without_signal_is_an_update_of_nothing(dense_model: Path) -> None:
    rank = connected(dense_model, lr=1e-3)
    equal = [replace(r, reward=1.0) for r in random_records(2)]
    stats = rank.train_update(ready(equal), 0, 0)
    assert (stats.loss, stats.grad_norm) == (0, 0)


def test_experts_train(moe_model: Path) -> None:
    rank = connected(moe_model, lr=1e-2)
    records = ready(random_records(6))
    before = rank.full_state()
    first = rank.train_update(records, 0, 0)
    last = [rank.train_update(records, 0, u) for u in range(1, 4)][-1]
    after = rank.full_state()
    assert first.grad_norm > 0 and last.loss < first.loss
    assert before is not None and after is not None
    moved = [n for n, w in before.items() if not torch.equal(w, after[n])]
    assert "model.layers.0.mlp.gate.weight" in moved
    assert sum(".mlp.experts." in n for n in moved) >= 4


# --- reference --------------------------------------------------------------------------------------------------------


def test_lm_13_no_coefficient_no_reference(dense_model: Path) -> None:
    rank = connected(dense_model)
    rank.train_update(ready(random_records(2)), 0, 0)
    assert rank.roles == ("actor",)


def test_lm_14_the_reference_stays_while_the_actor_moves(dense_model: Path) -> None:
    rank = connected(dense_model, lr=1e-2, loss=LossOptions(kl_coef=0.5))
    assert rank.roles == ("actor", "reference")
    records = ready(random_records(4))
    with pytest.raises(RealError, match=r"no reference log-probs, which kl_coef 0\.5 needs"):
        rank.train_update(records, 0, 0)
    frozen = rank.log_probs(records, "reference")
    for record, values in zip(records, frozen, strict=True):
        record.reference_log_probs = values
    first = rank.train_update(records, 0, 0)
    second = rank.train_update(records, 0, 1)
    assert first.reference_kl == pytest.approx(0, abs=1e-6)
    assert second.reference_kl > 1e-4
    assert all(np.array_equal(a, b) for a, b in zip(rank.log_probs(records, "reference"), frozen, strict=True))
    # The behaviour policy is another role: its log-probs move the ratio, not this divergence.
    for record in records:
        record.generation_log_probs = record.generation_log_probs - np.float32(0.05) * record.loss_mask
    third = rank.log_probs(records)
    current = np.concatenate([v[r.loss_mask] for v, r in zip(third, records, strict=True)])
    reference = np.concatenate([v[r.loss_mask] for v, r in zip(frozen, records, strict=True)])
    expected = float(np.mean(np.exp(reference - current) - 1 - (reference - current)))
    assert rank.train_update(records, 0, 2).reference_kl == pytest.approx(expected, rel=1e-4)


def test_an_unknown_model_is_refused(scorer: TrainerRank) -> None:
    with pytest.raises(RealError, match="no model 'critic' has log-probs; there are actor, reference"):
        scorer.log_probs([], "critic")


# --- weights and memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fixture", ["dense_model", "moe_model"])
def test_full_state_has_the_names_of_the_checkpoint(fixture: str, request: pytest.FixtureRequest) -> None:
    from safetensors.torch import load_file

    folder = request.getfixturevalue(fixture)
    rank = connected(folder, lr=1e-2)
    expected, state = load_file(folder / "model.safetensors"), rank.full_state()
    assert state is not None
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[n], w) and state[n].is_contiguous() for n, w in expected.items())
    rank.train_update(ready(random_records(2)), 0, 0)
    assert all(torch.equal(state[n], w) for n, w in expected.items()), "a snapshot follows no later update"


def test_engines_get_weights_in_the_dtype_of_the_passes(dense_model: Path) -> None:
    rank = connected(dense_model, dtype="bfloat16", lr=1e-2)
    stats = rank.train_update(ready(random_records(4)), 0, 0)
    assert stats.grad_norm > 0
    state = rank.full_state()
    assert state is not None
    assert {w.dtype for w in state.values()} == {torch.bfloat16}
    assert {p.dtype for p in rank.model.parameters()} == {torch.float32}


def test_offload_frees_and_onload_restores_bit_for_bit(dense_model: Path) -> None:
    rank = connected(dense_model, lr=1e-3)
    records = ready(random_records(4))
    rank.train_update(records, 0, 0)
    scores = rank.log_probs(records)
    storages = [p.to_local().untyped_storage() for p in rank.model.parameters()]  # type: ignore[attr-defined]
    storages += [s["exp_avg_sq"].to_local().untyped_storage() for s in rank.optimizer.state.values()]
    sizes = [s.nbytes() for s in storages]
    away = rank.offload()
    assert [s.nbytes() for s in storages] == [0] * len(storages)
    parameters = sum(p.numel() for p in rank.model.parameters())
    steps = len(list(rank.model.parameters()))
    assert away.bytes == 4 * (3 * parameters + steps)  # weights, two moments, one step count each
    assert away.seconds > 0
    with pytest.raises(RealError, match="offloaded; onload first"):
        rank.log_probs(records)
    assert rank.offload().bytes == 0
    back = rank.onload()
    assert back.bytes == away.bytes
    assert [s.nbytes() for s in storages] == sizes
    assert rank.onload().bytes == 0
    assert all(np.array_equal(a, b) for a, b in zip(rank.log_probs(records), scores, strict=True))
    other = connected(dense_model, lr=1e-3)
    other.train_update(records, 0, 0)
    assert rank.train_update(records, 0, 1).loss == other.train_update(records, 0, 1).loss
    mine, theirs = rank.full_state(), other.full_state()
    assert mine is not None and theirs is not None
    assert all(torch.equal(mine[n], w) for n, w in theirs.items())


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fixture", ["dense_model", "moe_model"])
def test_a_restored_trainer_continues_bit_for_bit(fixture: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder = request.getfixturevalue(fixture)
    records = ready(random_records(6))
    rank = connected(folder, lr=1e-3)
    for update in range(2):
        rank.train_update(records, 0, update)
    rank.save(tmp_path / "step-2", {"task": 17})
    expected = [rank.train_update(records, 1, update).loss for update in range(2)]
    rng, last = torch.get_rng_state(), rank.full_state()

    other = connected(folder, lr=1e-3, seed=5)
    torch.manual_seed(99)
    assert other.restore(tmp_path / "step-2") == {"task": 17}
    assert torch.equal(torch.get_rng_state(), rng)
    assert other.updates == 2
    assert [other.train_update(records, 1, update).loss for update in range(2)] == expected
    state = other.full_state()
    assert state is not None and last is not None
    assert all(torch.equal(state[n], w) for n, w in last.items())


def test_a_run_can_be_taken_back_to_its_start(dense_model: Path, tmp_path: Path) -> None:
    """Before any update there is no optimizer state; a trainer that is offloaded comes back whole."""
    rank = connected(dense_model, lr=1e-3)
    records = ready(random_records(4))
    rank.save(tmp_path / "start")
    first = [rank.train_update(records, 0, update).loss for update in range(3)]
    rank.offload()
    assert rank.restore(tmp_path / "start") == {}
    assert rank.updates == 0
    assert [rank.train_update(records, 0, update).loss for update in range(3)] == first


def test_a_checkpoint_is_a_model_folder(dense_model: Path, tmp_path: Path) -> None:
    rank = connected(dense_model, lr=1e-3)
    records = ready(random_records(4))
    rank.train_update(records, 0, 0)
    rank.save(tmp_path / "saved")
    assert [p.name for p in tmp_path.iterdir()] == ["saved"], "no temporary folder is left"
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["model_type"] == "qwen3" and config["dtype"] == "float32"
    model = plain.load(tmp_path / "saved")
    for record, values in zip(records, rank.log_probs(records), strict=True):
        assert values == pytest.approx(plain.log_probs(model, record).detach().numpy(), abs=1e-5)


def test_checkpoints_that_cannot_be_are_refused(scorer: TrainerRank, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(RealError, match="exists already"):
        scorer.save(tmp_path / "there")
    with pytest.raises(RealError, match=r"is no checkpoint \(it has no trainer.json\)"):
        scorer.restore(tmp_path / "there")


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.backend("CORE")
def test_options_that_cannot_work_are_refused(dense_model: Path, tmp_path: Path) -> None:
    with pytest.raises(RealError, match=r"is no model folder \(it has no config.json\)"):
        TrainerOptions(str(tmp_path))
    with pytest.raises(RealError, match="dtype is 'fp32'; it can be float32, bfloat16, float16"):
        TrainerOptions(str(dense_model), dtype="fp32")  # type: ignore[arg-type]
    with pytest.raises(RealError, match="temperature is 0"):
        TrainerOptions(str(dense_model), temperature=0)


def test_a_folder_that_transformers_cannot_load_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 128}')
    with pytest.raises(RealError, match=f"transformers cannot load {tmp_path}"):
        connected(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named(dense_model: Path) -> None:
    with pytest.raises(RealError, match="torch sees no GPU here"):
        TrainerRank(0, 1, TrainerOptions(str(dense_model), device="cuda"))
