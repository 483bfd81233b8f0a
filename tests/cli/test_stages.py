"""`testbed real` of a graph of stages, without a backend: the plan, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Cli, tree_of
from tests.scenario.test_stages import TEACHER_FIRST, write


@pytest.fixture
def graph(cli: Cli, tmp_path: Path) -> str:
    write(tmp_path, TEACHER_FIRST)
    return "stages.yaml"


def test_op_08_the_plan_says_order_what_is_trained_read_and_written(cli: Cli, graph: str, tmp_path: Path) -> None:
    before = tree_of(tmp_path)
    said = cli("real", graph, "--plan", "--out", "there")
    assert (said.code, said.err) == (0, "")
    assert [" ".join(line.split()) for line in said.out.splitlines()] == [
        "test: 4 stages, in this order",
        "1. sft sft trains a copy of tiny-qwen3; writes there/checkpoints/sft",
        "2. teacher rl trains a copy of sft; writes there/checkpoints/teacher",
        "3. student opd trains a copy of sft; reads teacher; writes there/checkpoints/student",
        "4. score evaluate measures student on 64 tasks, trains nothing",
    ]
    assert tree_of(tmp_path) == before, "nothing is written"


def test_only_takes_what_the_stage_is_made_of_along(cli: Cli, graph: str) -> None:
    said = cli("real", graph, "--plan", "--only", "teacher")
    assert [line.split()[1] for line in said.out.splitlines()[1:]] == ["sft", "teacher"]
    assert said.out.splitlines()[0] == "test: 2 stages, in this order"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("real", "stages.yaml", "--only", "studnt"), "--only studnt: no such stage (nearest: student)"),
        (("real", "stages.yaml", "--variant", "a"), "is a graph of stages (nearest: --only STAGE)"),
        (("real", "small.yaml", "--only", "a"), "--only: small.yaml is no graph of stages (nearest: leave it out)"),
        (("real", "small.yaml", "--plan"), "--plan: small.yaml is no graph of stages (nearest: leave it out)"),
        (("run", "stages.yaml"), "stages.yaml:1: stages: this is a graph of training stages, not a scenario"),
        (("compare", "stages.yaml"), "(nearest: testbed real stages.yaml)"),
        (("real", "stages.yaml", "--set", "model.name=x"), "a stage's inputs are what its graph says"),
        (("real", "stages.yaml", "--set", "run.sed=1"), "run.sed"),
        (("real", "stages.yaml", "--out", "taken"), "--out taken: the folder holds something else"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, tuple) else "",
)
def test_what_is_refused(cli: Cli, graph: str, tmp_path: Path, args: tuple[str, ...], said: str) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "letters.txt").write_text("mine")
    done = cli(*args)
    assert done.code == 2 and said in done.err and "Traceback" not in done.err, done.err
    assert not (tmp_path / "runs").exists()
