"""The reward model role: what it says, when it is loaded, and how one is made from right and wrong answers."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from real.environments.arithmetic import Arithmetic
from real.errors import RealError
from real.learning.options import LossOptions
from real.learning.reward_model import preference_loss
from real.models.reward_model import RewardTraining, pairs, train_reward_model
from real.models.tokenizer import CharTokenizer
from real.records import Record
from real.together import Together
from real.trainer.local import LocalRank
from real.trainer.options import TrainerOptions
from real.trainer.signals import with_advantages
from real.trainer.trainer import Trainer
from tests.real.trainer.conftest import make_record, random_records
from tests.real.trainer.test_roles import connected, weights
from tests.support.real_rig import scoring_model

TOKENS = CharTokenizer()


def sums(**options: Any) -> Arithmetic:
    return Arithmetic(tokenizer=TOKENS, members=1, seed=0, **options)


@pytest.fixture(scope="module")
def scorer(dense_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scoring_model(dense_model, tmp_path_factory.mktemp("scorer") / "model")


def by_transformers(folder: Path, records: list[Record]) -> list[float]:
    """One sequence at a time, without packing: the head's number at the last token."""
    from transformers import AutoModelForTokenClassification

    model = AutoModelForTokenClassification.from_pretrained(
        folder, num_labels=1, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    found = []
    with torch.no_grad():
        for record in records:
            ids = torch.from_numpy(record.token_ids.astype("int64"))
            found.append(model(input_ids=ids[None]).logits[0, -1, 0].item())
    return found


# --- the role ---------------------------------------------------------------------------------------------------------


def test_lm_03_a_reward_model_gives_one_number_for_a_whole_response(dense_model: Path, scorer: Path) -> None:
    rank = connected(dense_model, reward_model=str(scorer), max_tokens_per_gpu=64)
    records = random_records(9)
    assert rank.roles == ("actor",)
    found = rank.rewards(records)
    assert rank.roles == ("actor", "reward_model")
    assert found == pytest.approx(by_transformers(scorer, records), abs=1e-4)
    assert np.std(found) > 0.1


def test_a_reward_model_works_while_the_rest_is_away_and_never_learns(dense_model: Path, scorer: Path) -> None:
    rank = connected(dense_model, reward_model=str(scorer), lr=1e-2)
    records = random_records(4)
    before = rank.rewards(records)
    rank.train_update(with_advantages(records, "population"), 0, 0)
    held = weights(rank._reward_model)  # type: ignore[arg-type]
    rank.offload()
    assert rank.rewards(records) == before
    with pytest.raises(RealError, match="weights are offloaded"):
        rank.log_probs(records)
    rank.onload()
    from transformers import AutoModelForTokenClassification

    saved = AutoModelForTokenClassification.from_pretrained(scorer, num_labels=1).state_dict()
    assert all(torch.equal(saved[name], value) for name, value in held.items())


def test_er_02_what_is_no_reward_model_is_refused(dense_model: Path) -> None:
    with pytest.raises(RealError, match=r"there is no reward model; options\.reward_model asks for one"):
        connected(dense_model).rewards([])
    with pytest.raises(RealError, match="reward model's folder /nowhere is no model folder"):
        TrainerOptions(str(dense_model), reward_model="/nowhere")
    with pytest.raises(RealError, match="has no value head, so it is no reward model"):
        connected(dense_model, reward_model=str(dense_model)).rewards(random_records(1))


class Counting(LocalRank):
    """Notes the calls that reach the rank."""

    def __init__(self, target: Any) -> None:
        super().__init__(target)
        self.calls: list[str] = []

    async def call(self, method: str, *args: Any) -> Any:
        self.calls.append(method)
        return await super().call(method, *args)


def test_rewards_asked_while_it_trains_disturb_nothing_and_are_scored_together(dense_model: Path, scorer: Path) -> None:
    records = random_records(12)
    alone = connected(dense_model, lr=1e-2)
    expected_stats = alone.train_update(with_advantages(records[:6], "population"), 0, 0)
    rank = connected(dense_model, reward_model=str(scorer), lr=1e-2)
    handle = Counting(rank)
    trainer = Trainer([handle], LossOptions())
    scoring = Together(trainer.rewards)

    async def at_once() -> tuple[Any, list[float]]:
        training = asyncio.ensure_future(trainer.train_update(records[:6], 0, 0, 1))
        await asyncio.sleep(0)
        return await training, list(await asyncio.gather(*(scoring.ask(r) for r in records)))

    stats, rewards = asyncio.run(at_once())
    assert rewards == pytest.approx(by_transformers(scorer, records), abs=1e-4)
    assert (stats.loss, stats.grad_norm) == (expected_stats.loss, expected_stats.grad_norm)
    state, same = rank.full_state(), alone.full_state()
    assert state is not None and same is not None
    assert all(torch.equal(state[name], same[name]) for name in same)
    assert handle.calls[0] == "train_update" and handle.calls.count("rewards") <= 2, "one call for all that waited"


# --- making one -------------------------------------------------------------------------------------------------------


@pytest.mark.backend("CORE")
def test_the_preference_loss_in_closed_form() -> None:
    right, wrong = torch.tensor([0.0, math.log(3), 5.0, -2.0]), torch.tensor([0.0, 0.0, 5.0, 0.0])
    right.requires_grad_()
    loss = preference_loss(right, wrong)
    assert loss.tolist() == pytest.approx([math.log(2), math.log(4 / 3), math.log(2), math.log1p(math.exp(2))])
    loss.sum().backward()  # d/dr = sigmoid(r_right - r_wrong) - 1
    assert right.grad is not None
    assert right.grad.tolist() == pytest.approx([-1 / 2, -1 / 4, -1 / 2, -1 / (1 + math.exp(-2))])


@pytest.mark.backend("CORE")
def test_pairs_are_a_right_and_a_wrong_answer_to_one_sum() -> None:
    stream = pairs(sums(max_operand=9), 5)
    found = [next(stream) for _ in range(60)]
    again = pairs(sums(max_operand=9), 5)
    assert found == [next(again) for _ in range(60)]
    whole_numbers = 0
    for right, wrong in found:
        question, answer = TOKENS.decode(list(right[:-1])).split("=")
        a, b = map(int, question.split("+"))
        assert int(answer) == a + b and right[-1] == TOKENS.eos_id
        prompt = TOKENS.encode(question + "=")
        assert list(wrong[: len(prompt)]) == prompt and wrong != right
        said = TOKENS.decode(list(wrong[len(prompt) : -1]))
        whole_numbers += wrong[-1] == TOKENS.eos_id and said.isdecimal() and int(said) != a + b
    assert whole_numbers >= 30, "half of the wrong ones at least are well-formed and wrong in value"


def test_a_trained_reward_model_tells_right_sums_from_wrong_ones(dense_model: Path, tmp_path: Path) -> None:
    """Pairs of another seed; sums recur. With ten digits and 300 updates accuracy was 0.98 and 0.996 over two seeds,
    and on pairs of sums that training never saw 0.63 and 0.57: it mostly remembers."""
    (tmp_path / "start").mkdir()
    TOKENS.save(tmp_path / "start")
    for file in dense_model.iterdir():
        (tmp_path / "start" / file.name).write_bytes(file.read_bytes())
    options = RewardTraining(steps=120, lr=3e-3)
    fit = train_reward_model(tmp_path / "start", tmp_path / "checker", sums(max_operand=4), options)
    assert fit.accuracy > 0.8 and fit.loss < 0.5, "chance is 0.5 and ln 2"
    assert (tmp_path / "checker" / "tokenizer.json").is_file()
    with pytest.raises(RealError, match="checker exists already"):
        train_reward_model(tmp_path / "start", tmp_path / "checker", sums(max_operand=4), options)

    # the trainer's role loads that folder, and says what a verifier would, most of the time
    rank = connected(dense_model, reward_model=str(tmp_path / "checker"))
    right_over_wrong = []
    for a in range(5):
        for b in range(5):
            prompt = TOKENS.encode(f"{a}+{b}=")
            said = [[*TOKENS.encode(str(x)), TOKENS.eos_id] for x in (a + b, *(w for w in range(9) if w != a + b))]
            records = [make_record(i, [*prompt, *ids], len(prompt), [True] * len(ids)) for i, ids in enumerate(said)]
            right, *wrong = rank.rewards(records)
            right_over_wrong += [right > w for w in wrong]
    assert np.mean(right_over_wrong) > 0.8


@pytest.mark.backend("CORE")
def test_bad_input_to_reward_training(dense_model: Path, tmp_path: Path) -> None:
    class Silent(Arithmetic):
        def demonstrations(self, seed: int) -> None:
            return None

    silent = Silent(tokenizer=TOKENS, members=1, seed=0)
    with pytest.raises(RealError, match="has no answers to show"):
        train_reward_model(dense_model, tmp_path / "out", silent, RewardTraining(steps=1))
    with pytest.raises(RealError, match="no model '/nowhere'"):
        train_reward_model("/nowhere", tmp_path / "out", sums())
    with pytest.raises(RealError, match="steps is 0; it must be above 0"):
        RewardTraining(steps=0)
