"""MOPD^2 on real engines and a real trainer: one run with full rollouts and fresh turns, and what its learner was
handed. Expected prompts come from the file of sources, teacher log-probs from a transformers forward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from real.driver import RealBackend
from real.experience_files import write_records
from real.learning.distillation import CONTEXTS, TEACHER, context_hashes
from real.models.tokenizer import CharTokenizer
from real.records import Record
from testbed.core import actions as do
from testbed.core import events as said
from tests.contract.test_contract import every
from tests.real.trainer.conftest import make_record
from tests.support.invariants import replayed, watched
from tests.support.scenarios import scenario

TOKENS = CharTokenizer()
PROMPT = "((1+1)+1)+1="
TURNS = ("<tool>1+1</tool><obs>2</obs>", "<tool>2+1</tool><obs>3</obs>", "<tool>3+1</tool><obs>4</obs>", "4<eos>")
H1, H2 = (tuple(TOKENS.encode(PROMPT + "".join(TURNS[:n]))) for n in (2, 3))
"""P and two source turns, P and three."""
CALCULATOR = {"type": "calculator", "operators": ["+", "-"], "operations": 3, "max_turns": 4}


def teachers_rollout() -> Record:
    """The dialogue above as a record: what the calculator said is masked."""
    turns = [TOKENS.encode(turn) for turn in TURNS]
    mask, cuts = list[bool](), list[tuple[int, int]]()
    for turn in turns:
        said_by_tool = len(turn) - turn.index(TOKENS.obs_id) if TOKENS.obs_id in turn else 0
        cuts.append((len(mask), len(mask) + len(turn) - said_by_tool))
        mask += [True] * (len(turn) - said_by_tool) + [False] * said_by_tool
    prompt = TOKENS.encode(PROMPT)
    return make_record(0, [*prompt, *(i for turn in turns for i in turn)], len(prompt), mask, turns=tuple(cuts))


class Watched:
    """The trainer, and the records that it was asked to train on."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.records: list[Record] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    async def train_update(self, records: list[Record], batch: int, update: int, updates: int) -> Any:
        self.records += records if update == 0 else []
        return await self._trainer.train_update(records, batch, update, updates)


@pytest.fixture(scope="module")
def run(rig: Any) -> Any:
    """(what the learner was handed, events and actions, model folder)."""
    from tests.support.real_rig import for_real

    d = rig.deployment
    write_records(d.base_dir / "teacher.parquet", [teachers_rollout()])
    agent = {"name": "agent", "environment": CALCULATOR}
    sums = {"name": "sums", "environment": {"type": "arithmetic"}}
    config = for_real(
        scenario(
            workload__environment={
                "type": "prefixes",
                "environment": {"type": "mixture", "tasks": [agent, sums]},
                "sources": [{"file": "teacher.parquet", "kind": "agent"}],
                "full_share": 0.4,
                "after": [2, 3],
            },
            workload__max_response_length=120,
            algorithm={"advantage": "distillation", "n_samples_per_prompt": 2, "rollout_batch_size": 12},
            run__num_rollout=2,
        )
    )
    taught_by = {kind: str(d.model.path) for kind in ("agent", "sums")}
    config = config.model_copy(update={"real": config.real.model_copy(update={"teachers": taught_by})})
    records: list[Any] = []

    async def go() -> Watched:
        await d.reset(config)
        backend = RealBackend(config, d, [lambda event, actions: records.append((event, list(actions)))])
        watching = backend.services.trainer = Watched(d.trainer)  # type: ignore[assignment]
        await backend.run()
        return watching  # type: ignore[return-value]

    handed = rig.wait(go()).records
    watched(config, records)
    replayed(config, records)
    assert len(handed) == 48
    return handed, records, d.model.path


def prompt_of(record: Record) -> tuple[int, ...]:
    return tuple(record.token_ids[: record.prompt_tokens].tolist())


def test_op_10_and_op_13_prompts_are_histories_and_the_fresh_turn_alone_carries_loss(run: Any) -> None:
    handed, _, _ = run
    fresh = [r for r in handed if prompt_of(r) in (H1, H2)]
    assert {prompt_of(r) for r in fresh} == {H1, H2}
    for r in fresh:
        assert r.turns == ((0, r.response_tokens),), "one model call"
        assert r.loss_mask.all() and r.response_tokens > 0
    full = [r for r in handed if prompt_of(r) not in (H1, H2)]
    assert full and len(full) < len(handed)
    for r in full:
        text = TOKENS.decode(prompt_of(r))
        assert text.endswith("=") and "<tool>" not in text, "a question and nothing else"
    assert {TOKENS.decode(prompt_of(r)).count("(") for r in full} == {0, 2}, "full rollouts of both kinds"
    groups: dict[int, set[tuple[int, ...]]] = {}
    for r in handed:
        groups.setdefault(r.group, set()).add(prompt_of(r))
    assert len(groups) == 24 and all(len(prompts) == 1 for prompts in groups.values()), "a group shares its history"


def test_op_11_starts_wait_for_no_other_and_hold_nothing_of_it(run: Any) -> None:
    handed, records, _ = run
    first_end = next(t for t, _ in every(records, said.TurnFinished))
    begun = [a.trajectory for t, a in every(records, do.StartTurn) if t <= first_end]
    prompts = {r.trajectory: prompt_of(r) for r in handed}
    assert {H1, H2} <= {prompts[t] for t in begun}, "both were on their way before anything had ended"
    answers = {tuple(r.token_ids[r.prompt_tokens :].tolist()) for r in handed if prompt_of(r) == H1}
    assert not any(H2[len(H1) :][: len(y)] == y for y in answers), "h2's third turn is the source's"


def test_op_12_the_teacher_read_the_same_context(run: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    handed, _, folder = run
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    for r in handed:
        np.testing.assert_array_equal(r.extra[CONTEXTS], context_hashes(r.token_ids, r.prompt_tokens))
        ids = torch.from_numpy(r.token_ids.astype(np.int64))
        with torch.no_grad():
            log_probs = torch.log_softmax(model(ids[None]).logits[0], -1)[r.prompt_tokens - 1 : -1]
        expected = log_probs.gather(-1, ids[r.prompt_tokens :, None])[:, 0].numpy()
        np.testing.assert_allclose(r.extra[TEACHER][r.loss_mask], expected[r.loss_mask], atol=1e-4)
