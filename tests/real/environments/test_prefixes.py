"""Fresh turns from prepared histories as tasks: whose prompt is what, how many calls they take, what they can be
scored by, and files that are no sources."""

from __future__ import annotations

import asyncio
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from real.environments import RealTask, environment
from real.environments.calculator import Calculator
from real.environments.prefixes import Begun, Prefixes
from real.errors import RealError
from real.experience_files import write_records
from real.models.tokenizer import CharTokenizer
from testbed.scenario.environment import PrefixTasks
from tests.real.trainer.conftest import make_record

TOKENS = CharTokenizer()
CALCULATOR: dict[str, Any] = {"type": "calculator", "operators": ["+", "-"], "operations": 3, "max_turns": 4}
MIXTURE: dict[str, Any] = {
    "type": "mixture",
    "tasks": [{"name": "agent", "environment": CALCULATOR}, {"name": "sums", "environment": {"type": "arithmetic"}}],
}


def prefixes(base_dir: Path = Path(), seed: int = 0, **fields: Any) -> Prefixes:
    tree = {"type": "prefixes", "environment": CALCULATOR, "sources": [{"demonstrations": 8}], "full_share": 0.0}
    section = PrefixTasks.model_validate(tree | fields)
    made = environment(section, tokenizer=TOKENS, members=2, seed=seed, max_response_length=12, base_dir=base_dir)
    assert isinstance(made, Prefixes)
    return made


def drawn(env: Prefixes, n: int) -> list[RealTask]:
    return [task for _ in range(n) if (task := env.draw()) is not None]


def rollout(trajectory: int, prompt: str, *turns: tuple[str, str], **fields: Any) -> Any:
    """A record of (what the actor wrote, what followed) turns."""
    ids, mask, cuts = TOKENS.encode(prompt), list[bool](), list[tuple[int, int]]()
    start = len(ids)
    for wrote, followed in turns:
        a, b = TOKENS.encode(wrote), TOKENS.encode(followed)
        cuts.append((len(mask), len(mask) + len(a)))
        mask += [True] * len(a) + [False] * len(b)
        ids += a + b
    return make_record(trajectory, ids, start, mask, **({"turns": tuple(cuts)} | fields))


H = (
    "P=",
    ("<tool>1+1</tool>", "<obs>2</obs>"),
    ("<tool>2+1</tool>", "<obs>3</obs>"),
    ("<tool>3+1</tool>", "<obs>4</obs>"),
)
"""A prompt and three turns; `4<eos>` would be the fourth."""


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    write_records(tmp_path / "teacher.parquet", [rollout(0, *H, ("4<eos>", ""))])
    return tmp_path


def test_op_10_starts_are_histories_of_the_sources_and_the_rest_are_full_rollouts(teacher: Path) -> None:
    env = prefixes(teacher, sources=[{"file": "teacher.parquet"}], full_share=0.25)
    whole = Calculator(tokenizer=TOKENS, members=2, seed=0, operators=("+", "-"), operations=3, max_turns=4)
    tasks = drawn(env, 400)
    assert [t.index for t in tasks] == list(range(400))
    full = [t for t in tasks if not isinstance(t.payload, Begun)]
    assert abs(len(full) - 100) < 4 * (400 * 0.25 * 0.75) ** 0.5
    expected = [whole.draw() for _ in full]
    assert [t.prompt_ids for t in full] == [t.prompt_ids for t in expected if t is not None]
    assert all(t.environment for t in full)
    # After one, two and three source turns; the third history is the second and the source's own third turn.
    texts = ["P=<tool>1+1</tool><obs>2</obs>"]
    texts += [texts[-1] + "<tool>2+1</tool><obs>3</obs>"]
    texts += [texts[-1] + "<tool>3+1</tool><obs>4</obs>"]
    begun = [t for t in tasks if isinstance(t.payload, Begun)]
    assert {TOKENS.decode(t.prompt_ids) for t in begun} == set(texts)
    assert {t.prompt_ids for t in begun} == {tuple(TOKENS.encode(text)) for text in texts}, "ids, never text again"
    assert not any(t.environment for t in begun), "one call needs no calculator"
    assert {t.kind for t in tasks} == {"calculator"}


def test_op_11_one_turn_from_a_start_whatever_it_asks_for_and_none_of_it_in_another(teacher: Path) -> None:
    env = prefixes(teacher, sources=[{"file": "teacher.parquet"}], after=[2, 3])
    tasks = drawn(env, 40)
    h1 = next(t for t in tasks if t.payload.start.source_turns == 2)
    h2 = next(t for t in tasks if t.payload.start.source_turns == 3)
    y1 = TOKENS.encode("<tool>9+9</tool>")
    assert env.after_turn(h1, 0, 0, y1) is None, "a call that nobody answers"
    assert env.limits(h1, 0, 0, len(h1.prompt_ids)).stop_token_ids == (TOKENS.eos_id, TOKENS.tool_end_id)
    assert h2.prompt_ids == (*h1.prompt_ids, *TOKENS.encode("<tool>3+1</tool><obs>4</obs>"))
    assert [
        t.prompt_ids for t in drawn(prefixes(teacher, sources=[{"file": "teacher.parquet"}], after=[2, 3]), 40)
    ] == [t.prompt_ids for t in tasks], "what was generated from one start changes no other"
    assert env.again(h1.index).prompt_ids == h1.prompt_ids, "all members of a group, and a retry, share the history"
    assert set(h1.blocks) < set(h2.blocks) or h1.blocks[:1] == h2.blocks[:1], "and the radix cache sees it"


def test_op_10_demonstrations_are_sources_cut_where_the_actor_begins() -> None:
    env = prefixes(sources=[{"demonstrations": 3}], after=[2])
    texts = {TOKENS.decode(t.prompt_ids) for t in drawn(env, 60)}
    assert len(texts) == 3
    for text in texts:
        question, _, rest = text.partition("=")
        assert rest.count("<tool>") == rest.count("</obs>") == 2 and text.endswith("</obs>")
        assert eval(rest.split("<tool>")[1].split("</tool>")[0]) == int(rest.split("<obs>")[1].split("</obs>")[0])
        assert question.count("(") == 2
    full = prefixes(full_share=1.0)
    shown = next(islice(full.demonstrations(0) or (), 1))
    task = full.draw()
    assert task is not None and shown.ids[: len(task.prompt_ids)] == task.prompt_ids
    other = {t.prompt_ids for t in drawn(prefixes(sources=[{"demonstrations": 3}], after=[2], seed=1), 60)}
    assert not other & {tuple(TOKENS.encode(text)) for text in texts}, "another seed, other dialogues"


def test_op_12_a_start_has_the_kind_of_its_source(teacher: Path) -> None:
    sources = [{"file": "teacher.parquet", "kind": "agent"}, {"demonstrations": 5}]
    env = prefixes(teacher, environment=MIXTURE, sources=sources, full_share=0.5)
    tasks = drawn(env, 300)
    begun = [t for t in tasks if isinstance(t.payload, Begun)]
    assert {t.kind for t in begun} == {"agent"}, "sums have one turn, and no history to start from"
    assert {t.payload.start.teacher for t in begun} == {"agent"}
    assert {t.kind for t in tasks if t not in begun} == {"agent", "sums"}
    own = prefixes(environment=MIXTURE, sources=[{"demonstrations": 5, "kind": "agent"}])
    tasks = drawn(own, 200)
    assert len({t.payload.start.source for t in tasks}) == 5 and {t.kind for t in tasks} == {"agent"}


def test_op_05_a_last_turn_is_scored_and_one_in_the_middle_is_not(teacher: Path) -> None:
    env = prefixes(after=[3])
    (task,) = drawn(env, 1)
    answer = TOKENS.decode(task.prompt_ids).rpartition("<obs>")[2].removesuffix("</obs>")

    def reward(env: Prefixes, task: RealTask, text: str) -> float:
        ids = TOKENS.encode(text)
        return asyncio.run(env.reward(task, 0, task.prompt_ids, ids, [ids]))

    assert reward(env, task, f"{answer}<eos>") == 1.0
    assert reward(env, task, f"{answer}1<eos>") == 0.0
    for env in (prefixes(after=[2]), prefixes(teacher, sources=[{"file": "teacher.parquet"}], after=[3])):
        (task,) = drawn(env, 1)
        with pytest.raises(RealError, match=r"is not the last turn .* \(nearest: algorithm.advantage: distillation\)"):
            reward(env, task, "4<eos>")


def test_full_rollouts_are_the_inner_environments_own() -> None:
    async def dialogue() -> float:
        env = prefixes(full_share=1.0)
        (task,) = drawn(env, 1)
        who, outputs = (5, 0), list[list[int]]()
        await env.prepare(task, who)
        steps = task.payload.task.payload
        for turn, (expression, result) in enumerate(steps):
            outputs.append(TOKENS.encode(f"<tool>{expression}</tool>"))
            call = env.after_turn(task, 0, turn, outputs[-1])
            assert call is not None
            assert await env.run_tool(task, who, call) == TOKENS.encode(f"<obs>{result}</obs>")
        outputs.append(TOKENS.encode(f"{steps[-1][1]}<eos>"))
        assert env.after_turn(task, 0, 3, outputs[-1]) is None
        await env.release_member(task, who)
        reward = await env.reward(task, 0, task.prompt_ids, [], outputs)
        env.release(task.index)
        await env.close()
        return reward

    assert asyncio.run(dialogue()) == 1.0


def test_the_fingerprint_is_of_sources_and_shares(teacher: Path) -> None:
    write_records(teacher / "other.parquet", [rollout(0, *H, ("5<eos>", ""))])
    file, other = [{"file": "teacher.parquet"}], [{"file": "other.parquet"}]
    made = [
        prefixes(teacher, sources=file),
        prefixes(teacher, sources=other),
        prefixes(teacher, sources=file, full_share=0.1),
        prefixes(teacher, sources=file, after=[1]),
        prefixes(teacher, sources=file, seed=1),
        prefixes(),
    ]
    assert len({env.fingerprint for env in made}) == len(made)
    assert prefixes(teacher, sources=file).fingerprint == made[0].fingerprint


@pytest.mark.parametrize(
    ("records", "fields", "said"),
    [
        ([], {}, "teacher.parquet: it has no rollouts"),
        ([rollout(7, "P=", ("4", ""), turns=())], {}, "teacher.parquet: trajectory 7 has no turns .*nearest: columns"),
        ([rollout(7, "P=", ("4", ""))], {}, "none of 1 source dialogues has a turn after an intermediate history; the"),
        ([rollout(7, *H)], {"after": [3, 4]}, "has a turn after 3 or 4; the longest has 3 turns, .* follow 1 to 2"),
        (
            [make_record(7, [1, 2, 900, 3], 1, [True] * 3, turns=((0, 1), (1, 3)))],
            {},
            "teacher.parquet: trajectory 7 has token id 900, and this policy's tokenizer ends at 127",
        ),
    ],
)
def test_rollouts_that_are_no_sources(tmp_path: Path, records: list[Any], fields: dict[str, Any], said: str) -> None:
    write_records(tmp_path / "teacher.parquet", records)
    with pytest.raises(RealError, match=said):
        prefixes(tmp_path, sources=[{"file": "teacher.parquet"}], **fields)


def test_a_file_that_is_no_parquet(tmp_path: Path) -> None:
    (tmp_path / "teacher.parquet").write_text("no")
    with pytest.raises(RealError, match=r"teacher\.parquet: no Parquet file"):
        prefixes(tmp_path, sources=[{"file": "teacher.parquet"}])


def test_starts_do_not_repeat_what_chooses_a_part() -> None:
    """Two draws of one seed and index would tie full rollouts to one part."""
    env = prefixes(environment=MIXTURE, sources=[{"demonstrations": 8, "kind": "agent"}], full_share=0.5)
    full = [t for t in drawn(env, 400) if not isinstance(t.payload, Begun)]
    sums = np.mean([t.kind == "sums" for t in full])
    assert abs(sums - 0.5) < 4 * (0.25 / len(full)) ** 0.5
