"""Model folders: made once, the same for the same seed, warmed up into the range where groups have mixed rewards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from real.environments.arithmetic import Arithmetic
from real.environments.base import Demonstration
from real.environments.calculator import Calculator
from real.errors import RealError
from real.models.build import build_tiny
from real.models.prepare import PreparedModel, check_vocabulary, prepare_model
from real.models.presets import PRESETS, SMOLLM2, TINY, architecture
from real.models.tokenizer import CharTokenizer
from real.models.warmup import Warmup, answer_loss, evaluate, warm_up


def sums(**options: object) -> Arithmetic:
    return Arithmetic(**{"tokenizer": CharTokenizer(), "members": 8, "seed": 0} | options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def warm(cache: Path) -> PreparedModel:
    return prepare_model("tiny-llama", cache, 0, warmup=Warmup(), environment=sums())


@pytest.mark.parametrize("name", TINY)
def test_a_preset_is_a_model_of_the_catalogues_numbers(name: str, cache: Path) -> None:
    prepared = prepare_model(name, cache, 0)
    assert not prepared.cached
    model = AutoModelForCausalLM.from_pretrained(prepared.path)
    numbers = architecture(name)
    for key in set(numbers) - {"qk_norm"}:
        assert getattr(model.config, key) == numbers[key], key
    names = set(model.state_dict())
    assert any("q_norm" in n for n in names) == numbers.get("qk_norm", False)
    assert any("experts" in n for n in names) == ("num_experts" in numbers)
    assert prepared.parameters == sum(p.numel() for p in model.parameters())
    assert 500_000 <= prepared.parameters <= (20_000_000 if name == "wide-qwen3" else 3_000_000)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert prepared.vocab_size == prepared.tokenizer.vocab_size == 128
    ids = torch.tensor([prepared.tokenizer.encode("3+5=")])
    assert model(ids).logits.shape == (1, 4, 128)


def test_the_seed_decides_the_weights_and_the_cache_keeps_them(cache: Path, tmp_path: Path) -> None:
    first = prepare_model("tiny-qwen3", cache, 7)
    again = prepare_model("tiny-qwen3", cache, 7)
    assert (again.path, again.cached, again.parameters) == (first.path, True, first.parameters)
    elsewhere = prepare_model("tiny-qwen3", tmp_path, 7)
    other = prepare_model("tiny-qwen3", tmp_path, 8)
    assert elsewhere.path.name == first.path.name != other.path.name
    a, b, c = (load_file(m.path / "model.safetensors") for m in (first, elsewhere, other))
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not all(torch.equal(a[n], c[n]) for n in a)
    assert all(not p.name.startswith(".") for p in tmp_path.iterdir()), "nothing half-made is left"


def test_a_model_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    class Broken(Arithmetic):
        broken = False

        def demonstrations(self, seed: int) -> Iterator[Demonstration]:
            shown = super().demonstrations(seed)
            assert shown is not None
            yield from islice(shown, 600)
            raise RuntimeError("no more")

    environment = Broken(tokenizer=CharTokenizer(), members=8, seed=0)
    with pytest.raises(RuntimeError, match="no more"):
        prepare_model("tiny-llama", tmp_path, 0, warmup=Warmup(steps=20), environment=environment)
    assert list(tmp_path.iterdir()) == []


def sampled_accuracy(model: torch.nn.Module, environment: Arithmetic, tasks: int, members: int) -> torch.Tensor:
    """Share of right answers per task, sampled at temperature 1 by transformers' own loop: an independent reading."""
    tokenizer = CharTokenizer()
    questions = [environment.item(99, i) for i in range(tasks)]
    right = torch.zeros(tasks, members)
    by_length: dict[int, list[int]] = {}
    for i, (question, _) in enumerate(questions):
        by_length.setdefault(len(question), []).append(i)
    for rows in by_length.values():
        prompts = torch.tensor([tokenizer.encode(questions[i][0]) for i in rows]).repeat_interleave(members, 0)
        torch.manual_seed(0)
        out = model.generate(  # type: ignore[operator]
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=8, eos_token_id=tokenizer.eos_id, pad_token_id=tokenizer.pad_id,
        )  # fmt: skip
        for at, reply in enumerate(out[:, prompts.shape[1] :].tolist()):
            i = rows[at // members]
            wanted = [*tokenizer.encode(str(questions[i][1])), tokenizer.eos_id]
            right[i, at % members] = float(reply[: len(wanted)] == wanted)
    return right.mean(1)


def test_after_the_warm_up_sampled_answers_are_right_between_30_and_70_percent(warm: PreparedModel) -> None:
    model = AutoModelForCausalLM.from_pretrained(warm.path).eval()
    per_task = sampled_accuracy(model, sums(), 128, 8)
    accuracy = float(per_task.mean())
    assert 0.3 <= accuracy <= 0.7
    assert warm.warmup is not None
    assert warm.warmup.reached
    error = float((per_task * (1 - per_task)).mean() / (128 * 8)) ** 0.5  # binomial, per task
    assert abs(accuracy - warm.warmup.probability) < 4 * error + 0.1, "the reading is what sampling gives"
    mixed = float(((per_task > 0) & (per_task < 1)).float().mean())
    assert mixed > 0.5, "most groups of 8 have both"


def test_the_warm_up_is_the_same_for_the_same_seed(warm: PreparedModel, cache: Path, tmp_path: Path) -> None:
    again = prepare_model("tiny-llama", cache, 0, warmup=Warmup(), environment=sums())
    assert (again.path, again.cached, again.warmup) == (warm.path, True, warm.warmup)
    short = Warmup(steps=10)
    a, b = (
        prepare_model("tiny-qwen3-moe", tmp_path / part, 3, warmup=short, environment=sums()) for part in ("a", "b")
    )
    one, other = (load_file(m.path / "model.safetensors") for m in (a, b))
    assert all(torch.equal(one[n], other[n]) for n in one)
    assert a.warmup is not None
    assert (a.warmup.steps, a.warmup.reached) == (10, False)


def test_what_decides_the_warm_up_decides_the_folder(warm: PreparedModel, tmp_path: Path) -> None:
    short = Warmup(steps=0)
    names = [
        prepare_model("tiny-llama", tmp_path, seed, warmup=options, environment=environment).path.name
        for seed, options, environment in (
            (0, short, sums()),
            (0, short, sums(max_operand=8)),
            (0, short, sums(operators=("+", "-"))),
            (0, Warmup(steps=0, lr=1e-4), sums()),
            (1, short, sums()),
        )
    ]
    assert len(set(names)) == 5
    assert warm.path.name not in names
    same = prepare_model("tiny-llama", tmp_path, 0, warmup=short, environment=sums(seed=5, members=2))
    assert same.cached, "the run's own seed and group size change no demonstration"


def test_er_05_an_observation_is_context_of_later_tokens_and_has_no_loss_of_its_own(warm: PreparedModel) -> None:
    environment = Calculator(tokenizer=CharTokenizer(), members=1, seed=0)
    shown = next(iter(environment.demonstrations(1) or ()))
    model = AutoModelForCausalLM.from_pretrained(warm.path).eval()
    at = shown.ids.index(CharTokenizer.obs_id) + 1
    changed = Demonstration((*shown.ids[:at], ord("x"), *shown.ids[at + 1 :]), shown.trained)

    def expected(d: Demonstration) -> list[float]:
        """log p of the trained tokens, by hand."""
        log_probs = model(torch.tensor([d.ids])).logits[0].log_softmax(-1)
        return [float(log_probs[i - 1, t]) for i, t in enumerate(d.ids) if d.trained[i]]

    with torch.no_grad():
        before, after = expected(shown), expected(changed)
        assert float(answer_loss(model, [shown])) == pytest.approx(-sum(before) / len(before), abs=1e-5)
        assert float(answer_loss(model, [changed])) == pytest.approx(-sum(after) / len(after), abs=1e-5)
    earlier = sum(shown.trained[:at])
    assert before[:earlier] == pytest.approx(after[:earlier], abs=1e-5)
    assert all(abs(a - b) > 1e-4 for a, b in zip(before[earlier:], after[earlier:], strict=True))


def test_padding_changes_no_reading(warm: PreparedModel) -> None:
    model = AutoModelForCausalLM.from_pretrained(warm.path).eval()
    batch = list(islice(sums(max_operand=99).demonstrations(0) or (), 6))
    assert len({len(d.ids) for d in batch}) > 1
    alone = [evaluate(model, [d])[2] for d in batch]
    assert evaluate(model, batch)[2] == pytest.approx(sum(alone) / 6, abs=1e-6)


def test_a_folder_of_ones_own_is_used_or_warmed_up_as_it_is(warm: PreparedModel, tmp_path: Path) -> None:
    used = prepare_model(str(warm.path), tmp_path, 0)
    assert (used.path, used.cached, used.parameters) == (warm.path, True, warm.parameters)
    assert used.tokenizer.encode("<tool>1</tool>") == [3, 49, 4]
    further = prepare_model(str(warm.path), tmp_path, 0, warmup=Warmup(steps=5, target=1.0), environment=sums())
    assert further.path.parent == tmp_path
    assert further.warmup is not None
    assert further.warmup.steps == 5
    assert prepare_model(str(further.path), tmp_path, 0).vocab_size == 128


@pytest.mark.backend("CORE")
def test_what_is_no_model_is_refused(tmp_path: Path, warm: PreparedModel) -> None:
    def refused(name: str | Path, match: str) -> None:
        with pytest.raises(RealError, match=match):
            prepare_model(str(name), tmp_path / "cache", 0)

    refused("tiny-lama", r"no model 'tiny-lama'.*did you mean tiny-llama\?")
    refused(tmp_path / "nowhere", r"neither a preset nor a folder; models that need no folder: tiny-llama")
    refused(Path(__file__), r"is a file; a model is a folder")
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(empty, r"no config\.json \(there: nothing\)")
    (empty / "notes.txt").touch()
    refused(empty, r"no config\.json \(there: notes\.txt\)")
    (empty / "config.json").write_text(json.dumps({"vocab_size": 100, "eos_token_id": 2}))
    refused(empty, r"has no weights: none of model\.safetensors.*there: config\.json, notes\.txt")
    (empty / "model.safetensors").touch()
    refused(empty, r"has no tokenizer\.json")
    CharTokenizer().save(empty)
    refused(empty, r"largest token id is 127, but vocab_size is 100 \(ids 0 to 99\)")
    (empty / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    with pytest.raises(RealError, match="names no vocab_size"):
        check_vocabulary(empty, CharTokenizer())
    assert not (tmp_path / "cache").exists()
    with pytest.raises(RealError, match="needs an environment"):
        prepare_model("tiny-llama", tmp_path / "cache", 0, warmup=Warmup())
    assert SMOLLM2 in PRESETS


def test_training_leaves_the_thread_count_and_random_state_alone(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        prepare_model("tiny-llama", tmp_path, 0, warmup=Warmup(steps=2), environment=sums())
        assert torch.equal(torch.rand(3), expected)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_a_warm_up_of_no_steps_only_reads() -> None:
    model = build_tiny("tiny-llama", 0)
    before = {n: w.clone() for n, w in model.state_dict().items()}
    stream = iter(sums().demonstrations(0) or ())
    result = warm_up(model, stream, list(islice(stream, 4)), Warmup(steps=0))
    assert (result.steps, result.reached) == (0, False)
    assert all(torch.equal(before[n], w) for n, w in model.state_dict().items())
