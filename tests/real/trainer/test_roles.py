"""Roles beside the actor, on one rank: a critic that is trained, a reference and teachers that never are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from real.errors import RealError
from real.learning.options import LossOptions
from real.records import Record
from real.trainer.local import LocalRank
from real.trainer.options import CriticOptions, SignalOptions, TrainerOptions
from real.trainer.rank import TrainerRank
from real.trainer.signals import with_advantages, with_returns
from real.trainer.trainer import Trainer
from tests.real.trainer import plain
from tests.real.trainer.conftest import VOCABULARY, make_record, random_records

PPO = SignalOptions("critic")


def connected(folder: Path, **options: object) -> TrainerRank:
    rank = TrainerRank(0, 1, TrainerOptions(str(folder), **options))  # type: ignore[arg-type]
    rank.connect(*rank.address())
    return rank


def valued(rank: TrainerRank, records: Sequence[Record]) -> list[Record]:
    """With the critic's values of now."""
    found = rank.values(list(records))
    return [replace(r, extra={**r.extra, "values": v}) for r, v in zip(records, found, strict=True)]


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().full_tensor().clone() for n, p in model.named_parameters()}  # type: ignore[attr-defined]


def same(before: dict[str, torch.Tensor], model: torch.nn.Module) -> bool:
    return all(torch.equal(before[n], w) for n, w in weights(model).items())


@pytest.fixture(scope="module")
def two_teachers(dense_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Checkpoints of models that learnt something else than the student: stages that feed a teacher."""
    folders = {}
    for seed, name in enumerate(("math", "code")):
        specialist = connected(dense_model, lr=1e-2)
        for update in range(3):
            specialist.train_update(with_advantages(random_records(4, seed), "population"), 0, update)
        folders[name] = str(tmp_path_factory.mktemp("teachers") / name)
        specialist.save(folders[name])
    return folders


# --- only what is asked for -------------------------------------------------------------------------------------------


def test_each_role_is_loaded_when_it_is_first_asked(dense_model: Path, two_teachers: dict[str, str]) -> None:
    rank = connected(dense_model, teachers=two_teachers, critic=CriticOptions())
    records = random_records(2)
    rank.train_update(with_advantages(records, "population"), 0, 0)
    assert rank.roles == ("actor",)
    rank.log_probs(records, "teacher:code")
    assert rank.roles == ("actor", "teacher:code")
    rank.values(records)
    rank.log_probs(records, "reference")
    assert rank.roles == ("actor", "critic", "teacher:code", "reference")


def test_a_role_that_was_not_configured_is_refused(dense_model: Path, two_teachers: dict[str, str]) -> None:
    rank = connected(dense_model, teachers={"math": two_teachers["math"]})
    says = "no model 'teacher:code' has log-probs; there are actor, reference, teacher:math"
    with pytest.raises(RealError, match=says):
        rank.log_probs([], "teacher:code")
    with pytest.raises(RealError, match=r"there is no critic; options\.critic asks for one"):
        rank.values([])
    with pytest.raises(RealError, match="teacher x's model folder /nowhere is no model folder"):
        TrainerOptions(str(dense_model), teachers={"x": "/nowhere"})
    with pytest.raises(RealError, match="critic lr is 0"):
        CriticOptions(lr=0)


# --- critic -----------------------------------------------------------------------------------------------------------


def test_a_new_critic_expects_nothing(dense_model: Path) -> None:
    rank = connected(dense_model, critic=CriticOptions())
    records = random_records(3)
    for record, values in zip(records, rank.values(records), strict=True):
        assert values.dtype == np.float32 and values.tolist() == [0] * record.response_tokens


def trained_critic(folder: Path, updates: int = 3, **options: object) -> tuple[TrainerRank, list[Record]]:
    rank = connected(folder, critic=CriticOptions(lr=1e-2, value_clip=None), max_tokens_per_gpu=48, **options)
    records = random_records(6)
    for update in range(updates):
        rank.train_critic(with_returns(valued(rank, records), PPO), 0, update)
    return rank, records


def test_values_are_of_the_context_before_each_token(dense_model: Path, tmp_path: Path) -> None:
    """Against the critic's checkpoint in transformers, one prefix at a time."""
    from transformers import AutoModelForTokenClassification

    rank, records = trained_critic(dense_model)
    rank.save(tmp_path / "saved")
    model = AutoModelForTokenClassification.from_pretrained(
        tmp_path / "saved" / "critic", num_labels=1, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for record, values in zip(records[:3], rank.values(records), strict=False):
        for t, value in enumerate(values):
            before = torch.from_numpy(record.token_ids[: record.prompt_tokens + t].astype("int64"))
            assert value == pytest.approx(model(input_ids=before[None]).logits[0, -1, 0].item(), abs=1e-4)
        assert np.abs(values).max() > 1e-3


def test_first_update_of_a_critic_by_hand(dense_model: Path) -> None:
    """Values 0 and returns 1 or 0: half the squared error is the share of tokens with return 1, halved."""
    rank = connected(dense_model, critic=CriticOptions(), max_tokens_per_gpu=48)
    records = with_returns(valued(rank, random_records(6)), PPO)
    won = sum(int(r.loss_mask.sum()) for r in records if r.reward == 1)
    tokens = sum(int(r.loss_mask.sum()) for r in records)
    stats = rank.train_critic(records, 3, 1)
    assert (stats.batch, stats.update, stats.tokens, stats.clip_share) == (3, 1, tokens, 0)
    assert stats.loss == pytest.approx(won / tokens / 2)
    assert stats.explained_variance == pytest.approx(0, abs=1e-9)
    # The gradient of the head's bias is mean(V - G), and Adam's first step is the learning rate in its direction.
    bias = dict(rank.critic.model.named_parameters())["score.bias"].full_tensor()  # type: ignore[attr-defined]
    assert bias.item() == pytest.approx(1e-5, rel=1e-3)


def test_explained_variance_of_values_that_are_half_right(dense_model: Path) -> None:
    """Returns 0 and 1 in equal shares, values a quarter and three quarters: 1 - (1/16) / (1/4)."""
    rank = connected(dense_model, critic=CriticOptions())
    records = [make_record(i, [1, 2, 3], 1, [True, True], reward=float(i)) for i in range(2)]
    for record in records:
        record.extra["values"] = np.full(2, 0.25 + record.reward / 2, np.float32)
        record.extra["returns"] = np.full(2, record.reward, np.float32)
    assert rank.train_critic(records, 0, 0).explained_variance == pytest.approx(0.75)


def test_a_critic_learns_what_to_expect(dense_model: Path) -> None:
    """The prompt tells the return. Over three seeds the explained variance reached 0.97 to 0.99."""
    rank = connected(dense_model, critic=CriticOptions(lr=3e-3))
    rng = np.random.default_rng(0)
    records = []
    for i in range(16):
        ids = [5 + i % 2, *rng.integers(10, VOCABULARY, 6).tolist()]
        records.append(make_record(i, ids, 1, [True] * 6, reward=float(i % 2)))
    for update in range(25):
        stats = rank.train_critic(with_returns(valued(rank, records), PPO), 0, update)
    assert stats.explained_variance > 0.8


def test_lm_08_policy_and_value_losses_leave_each_others_model_alone(dense_model: Path) -> None:
    rank, records = trained_critic(dense_model, lr=1e-2)
    actor, critic = weights(rank.model), weights(rank.critic.model)
    rank.train_critic(with_returns(valued(rank, records), PPO), 1, 0)
    assert same(actor, rank.model) and not same(critic, rank.critic.model)
    critic = weights(rank.critic.model)
    rank.train_update(with_advantages(valued(rank, records), "population", PPO), 1, 0)
    assert same(critic, rank.critic.model) and not same(actor, rank.model)
    assert all(p.grad is None for m in (rank.model, rank.critic.model) for p in m.parameters())


def test_the_critics_gradient_does_not_depend_on_the_micro_batches(dense_model: Path) -> None:
    records = random_records(8)
    for record in records:
        record.extra["values"] = np.linspace(0, 1, record.response_tokens, dtype=np.float32)
    records = with_returns(records, SignalOptions("critic", lambd=0.9))
    found = []
    for tokens in (10_000, 1):
        rank = connected(dense_model, critic=CriticOptions(), max_tokens_per_gpu=tokens)
        stats = rank.train_critic(records, 0, 0)
        found.append((stats.loss, stats.grad_norm, stats.explained_variance, stats.clip_share))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_critic_comes_back_with_its_checkpoint_and_from_offload(dense_model: Path, tmp_path: Path) -> None:
    rank, records = trained_critic(dense_model)
    rank.save(tmp_path / "saved")
    ready = with_returns(valued(rank, records), PPO)
    away = rank.offload()
    actor, critic = (sum(p.numel() for p in m.parameters()) for m in (rank.model, rank.critic.model))
    steps = len(list(rank.critic.model.parameters()))
    assert away.bytes == 4 * (actor + 3 * critic + steps)  # the actor was never updated: it has no optimizer state
    rank.onload()
    expected = [rank.train_critic(ready, 1, update).loss for update in range(2)]
    other = connected(dense_model, critic=CriticOptions(lr=1e-2, value_clip=None), max_tokens_per_gpu=48)
    other.restore(tmp_path / "saved")
    assert other.roles == ("actor", "critic")
    assert [other.train_critic(ready, 1, update).loss for update in range(2)] == expected


def test_er_02_a_record_without_values_or_returns_is_refused(dense_model: Path) -> None:
    rank = connected(dense_model, critic=CriticOptions())
    with pytest.raises(RealError, match="trajectory 0 has no values, which the critic needs"):
        rank.train_critic(random_records(2), 0, 0)
    with pytest.raises(RealError, match="trajectory 0 has no returns, which the critic needs"):
        rank.train_critic(valued(rank, random_records(2)), 0, 0)


# --- teachers ---------------------------------------------------------------------------------------------------------


def test_op_03_and_op_01_a_teacher_reads_the_students_path(dense_model: Path, two_teachers: dict[str, str]) -> None:
    """Its probability of d is of P+u+b, where the student was, and not of the answer's P+u+a."""
    rank = connected(dense_model, teachers=two_teachers)
    prompt, u, b, d, a = [7, 8], 20, 21, 22, 23
    (found,) = rank.log_probs([make_record(0, [*prompt, u, b, d], 2, [True] * 3)], "teacher:math")
    teacher = plain.load(Path(two_teachers["math"]))

    def log_p(context: list[int], token: int) -> float:
        logits = teacher(input_ids=torch.tensor([context])).logits[0, -1]
        return torch.log_softmax(logits, -1)[token].item()

    expected = [log_p(prompt, u), log_p([*prompt, u], b), log_p([*prompt, u, b], d)]
    assert found.tolist() == pytest.approx(expected, abs=1e-5)
    assert found[2] != pytest.approx(log_p([*prompt, u, a], d), abs=1e-3)


def test_op_07_a_teacher_gives_a_distribution_and_a_critic_a_number(
    dense_model: Path, two_teachers: dict[str, str]
) -> None:
    rank = connected(dense_model, teachers=two_teachers, critic=CriticOptions())
    every = [make_record(token, [7, 8, token], 2, [True]) for token in range(VOCABULARY)]
    mass = sum(float(np.exp(v[0])) for v in rank.log_probs(every, "teacher:code"))
    assert mass == pytest.approx(1, abs=1e-5)
    # What a critic expects at P does not depend on the token that is then chosen.
    assert len({float(v[0]) for v in rank.values(every)}) == 1
    with pytest.raises(RealError, match="no model 'critic' has log-probs"):
        rank.log_probs(every, "critic")


def driven(rank: TrainerRank, signals: SignalOptions) -> Trainer:
    return Trainer([LocalRank(rank)], LossOptions(), signals)


def test_op_12_several_teachers_each_for_its_own_samples(dense_model: Path, two_teachers: dict[str, str]) -> None:
    rank = connected(dense_model, teachers=two_teachers)
    records, names = random_records(5), ["math", "code", "code", "math", "code"]
    found = asyncio.run(driven(rank, SignalOptions()).teacher_log_probs(records, names))
    models = {name: plain.load(Path(folder)) for name, folder in two_teachers.items()}
    for record, name, values in zip(records, names, found, strict=True):
        expected = plain.log_probs(models[name], record).detach().numpy()
        assert values["teacher_log_probs"] == pytest.approx(expected, abs=1e-5)
    with pytest.raises(RealError, match="no model 'teacher:law'"):
        asyncio.run(driven(rank, SignalOptions()).teacher_log_probs(records[:1], ["law"]))


def test_op_09_distillation_trains_the_student_alone(dense_model: Path, two_teachers: dict[str, str]) -> None:
    """Two updates on two teachers' signals: the student's weights move; each teacher in memory is its file, bit by
    bit, and says the same of the same tokens."""
    rank = connected(dense_model, teachers=two_teachers, lr=1e-2)
    trainer = driven(rank, SignalOptions("distillation"))
    records, names = random_records(4), ["math", "code", "math", "code"]
    student = weights(rank.model)
    before = asyncio.run(trainer.teacher_log_probs(records, names))
    taught = [replace(r, extra={**r.extra, **v}) for r, v in zip(records, before, strict=True)]
    for update in range(2):
        asyncio.run(trainer.train_update(taught, update, 0, 1))
    assert not same(student, rank.model)
    for name, folder in two_teachers.items():
        teacher = rank._net(f"teacher:{name}")
        assert same(weights_of(Path(folder)), teacher)
        assert not any(p.requires_grad for p in teacher.parameters())
    after = asyncio.run(trainer.teacher_log_probs(records, names))
    for a, b in zip(before, after, strict=True):
        assert np.array_equal(a["teacher_log_probs"], b["teacher_log_probs"])


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {n: p.detach() for n, p in plain.load(folder).named_parameters()}


def test_op_15_a_stage_leaves_a_checkpoint_that_starts_a_student_or_feeds_it(
    dense_model: Path, two_teachers: dict[str, str]
) -> None:
    """One process ran the specialist's stage; another stage starts from its folder, or reads it as a teacher."""
    records = random_records(3)
    started = connected(Path(two_teachers["math"])).log_probs(records)
    taught = connected(dense_model, teachers=two_teachers).log_probs(records, "teacher:math")
    fresh = connected(dense_model).log_probs(records)
    for a, b, c in zip(started, taught, fresh, strict=True):
        assert a == pytest.approx(b, abs=1e-6)
        assert np.abs(a - c).max() > 1e-3


def test_a_token_beyond_a_teachers_vocabulary_is_named(dense_model: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(dense_model, vocab_size=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    rank = connected(dense_model, teachers={"small": str(tmp_path)})
    with pytest.raises(RealError, match="trajectory 3 has token id 100; the model's vocabulary has 64"):
        rank.log_probs([make_record(3, [1, 100], 1, [True])], "teacher:small")
