"""Who teaches which task of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from real.environments.base import RealTask
from real.errors import RealError
from real.settings import teachers_of, teaching_of
from tests.support.scenarios import scenario

pytestmark = pytest.mark.backend("CORE")

MODEL, HERE = Path("/start"), Path("/folder")


def asked(teachers: Any, *tasks: tuple[int, str]) -> tuple[dict[str, str], list[str]]:
    """(name -> folder, folder that each (index, kind) is taught by)."""
    config = scenario(real__teachers=teachers, algorithm__advantage="distillation")
    folders, teacher_of = teachers_of(config, HERE, MODEL), teaching_of(config)
    return folders, [folders[teacher_of(RealTask(i, (1,), (), 16, False, 0, None, kind))] for i, kind in tasks]


def test_op_12_a_mapping_assigns_by_kind_whatever_the_index() -> None:
    folders, taught = asked({"plus": "p", "minus": "m"}, (0, "plus"), (1, "plus"), (2, "minus"), (3, "minus"))
    assert taught == ["/folder/p", "/folder/p", "/folder/m", "/folder/m"]
    folders, taught = asked({"plus": "p", "minus": "p"}, (0, "plus"), (1, "minus"))
    assert len(folders) == 1 and taught == ["/folder/p"] * 2, "one model with two subjects is loaded once"


def test_op_12_a_kind_without_a_teacher_is_an_error() -> None:
    with pytest.raises(RealError, match="no teacher is assigned to 'chat'; kinds with one: minus, plus"):
        asked({"plus": "p", "minus": "m"}, (0, "chat"))


def test_a_list_takes_turns_and_none_is_the_start_model() -> None:
    tasks = [(i, "any") for i in range(5)]
    assert asked(["a", "b", "a"], *tasks)[1] == [f"/folder/{x}" for x in "abaab"]
    assert asked([], *tasks)[1] == asked({}, *tasks)[1] == [str(MODEL)] * 5
    assert teachers_of(scenario(), HERE, MODEL) == {}, "nobody asked"
