"""Experience as Parquet: exact both ways, other people's types, and what a wrong file is told."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from real.errors import RealError
from real.experience_files import OPTIONAL, REQUIRED, ROWS, read_records, write_records
from real.records import Record

REPOSITORY = Path(__file__).parents[2]


def record(trajectory: int = 0, seed: int = 0, **changes: Any) -> Record:
    """Two calls with an observation between them, generated under two versions; T = 9, R = 6."""
    rng = np.random.default_rng(seed)
    values: dict[str, Any] = {
        "group": trajectory // 2,
        "task": 5,
        "prompt_tokens": 3,
        "token_ids": rng.integers(0, 2**31 - 1, 9, dtype=np.int32),
        "loss_mask": np.array([1, 1, 0, 0, 1, 1], dtype=np.bool_),
        "generation_log_probs": np.float32([-0.1, -2.5, 0, 0, -1e-30, -7]),
        "spans": ((3, 0, 1), (4, 1, 2), (4, 4, 6)),
        "reward": 0.1 + trajectory,
        "finish_reason": "stop",
        "turns": ((0, 2), (4, 6)),
    }
    return Record(trajectory=trajectory, **(values | changes)).check()


def same(a: Record, b: Record) -> bool:
    """Every field, arrays in bits and type."""

    def equal(x: Any, y: Any) -> bool:
        if isinstance(x, np.ndarray) and isinstance(y, np.ndarray):
            return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
        if isinstance(x, dict):
            return x.keys() == y.keys() and all(equal(x[k], y[k]) for k in x)
        return type(x) is type(y) and bool(x == y)

    return all(equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(Record))


def test_er_02_every_field_comes_back_exactly(tmp_path: Path) -> None:
    full = record(
        1,
        old_log_probs=np.float32([np.nan, -0.0, 1, 2, 3, 4]),
        reference_log_probs=np.arange(6, dtype=np.float32),
        routed_experts=np.arange(8 * 2 * 3, dtype=np.int32).reshape(8, 2, 3),
        extra={"teacher": np.float32([1, 2, 3, 4, 5, np.inf]), "critic": np.zeros(6, np.float32)},
    )
    held = [record(0), full, record(2, extra={"critic": np.ones(6, np.float32)}, turns=(), finish_reason="")]
    assert write_records(tmp_path / "e.parquet", held) == 3
    found = list(read_records(tmp_path / "e.parquet"))
    assert len(found) == 3 and all(same(a, b) for a, b in zip(held, found, strict=True))
    assert found[0].extra == {} and found[0].old_log_probs is None and found[0].routed_experts is None
    found[1].token_ids[0] = 1  # a copy of its own, like any other record's
    assert [p.name for p in tmp_path.iterdir()] == ["e.parquet"]


@st.composite
def any_record(draw: st.DrawFn, trajectory: int) -> Record:
    floats = st.floats(width=32)
    prompt, pieces = draw(st.integers(1, 4)), draw(st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=5))
    mask: list[bool] = []
    spans = []
    for n, (length, actor) in enumerate(pieces):
        spans += [(n, len(mask), len(mask) + length)] if actor else []
        mask += [actor] * length
    response = len(mask)

    def per_token(values: st.SearchStrategy[float] = floats) -> np.ndarray:
        return np.array(draw(st.lists(values, min_size=response, max_size=response)), np.float32)

    names = draw(st.sets(st.sampled_from(["teacher", "a b", "é"])))
    size = prompt + response
    return Record(
        trajectory=trajectory,
        group=draw(st.integers(0, 2**40)),
        task=draw(st.integers(0, 9)),
        prompt_tokens=prompt,
        token_ids=np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=size, max_size=size)), np.int32),
        loss_mask=np.array(mask, np.bool_),
        generation_log_probs=per_token(st.floats(-100, 0, width=32)),
        spans=tuple(spans),
        reward=draw(st.floats(allow_nan=False)),
        finish_reason=draw(st.sampled_from(["stop", "length", "aborted", ""])),
        old_log_probs=per_token() if draw(st.booleans()) else None,
        routed_experts=np.zeros((size - 1, 2, 1), np.int32) if draw(st.booleans()) else None,
        turns=tuple((a, b) for _, a, b in spans),
        extra={name: per_token() for name in names},
    ).check()


@settings(max_examples=40, deadline=None)
@given(data=st.data(), count=st.integers(0, 4))
def test_er_02_any_records_come_back_exactly(
    data: st.DataObject, count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("any") / "e.parquet"
    held = [data.draw(any_record(i)) for i in range(count)]
    write_records(path, held)
    found = list(read_records(path))
    assert len(found) == count and all(same(a, b) for a, b in zip(held, found, strict=True))


def test_more_rows_than_are_read_at_once(tmp_path: Path) -> None:
    held = [record(i, i) for i in range(2 * ROWS + 5)]
    write_records(tmp_path / "e.parquet", held)
    assert all(same(a, b) for a, b in zip(held, read_records(tmp_path / "e.parquet"), strict=True))


def columns(*records: Record) -> dict[str, list[Any]]:
    """The required columns by hand, as somebody else's program would write them."""
    return {
        "trajectory": [r.trajectory for r in records],
        "group": [r.group for r in records],
        "task": [r.task for r in records],
        "prompt_tokens": [r.prompt_tokens for r in records],
        "token_ids": [r.token_ids.tolist() for r in records],
        "loss_mask": [r.loss_mask.tolist() for r in records],
        "generation_log_probs": [r.generation_log_probs.tolist() for r in records],
        "span_versions": [[s[0] for s in r.spans] for r in records],
        "span_starts": [[s[1] for s in r.spans] for r in records],
        "span_ends": [[s[2] for s in r.spans] for r in records],
        "reward": [r.reward for r in records],
    }


def written(path: Path, values: dict[str, Any], **schema: Any) -> Path:
    pq.write_table(pa.table(values), path, **schema)
    return path


def test_er_02_files_of_other_programs_are_read_with_wider_types(tmp_path: Path) -> None:
    """int64 and float64 lists as pyarrow and pandas make them, large lists, whole rewards, no optional column."""
    r = record(7, reward=1.0, finish_reason="", turns=())
    values: dict[str, Any] = columns(r)
    values["token_ids"] = pa.array(values["token_ids"], pa.large_list(pa.int64()))
    values["reward"] = [1]
    [found] = read_records(written(tmp_path / "e.parquet", values))
    assert same(found, r)


def change(column: str, value: Any, row: int = 1) -> dict[str, list[Any]]:
    values = columns(record(0), record(1))
    values[column][row] = value
    return values


@pytest.mark.parametrize(
    ("column", "value", "what"),
    [
        ("trajectory", 0, "0 is there twice"),
        ("prompt_tokens", 0, "0 of 9 tokens"),
        ("prompt_tokens", 10, "10 of 9 tokens"),
        ("prompt_tokens", None, "null, and the column must have a value"),
        ("token_ids", [1, 2, 3, 4], "4 response tokens|6 entries for 1 response tokens"),
        ("token_ids", [1, 2, 3, 4, 5, 6, 7, 8, 2**31], "2147483648"),
        ("token_ids", [1, 2, 3, 4, 5, 6, 7, 8, -1], "id -1 at position 8"),
        ("token_ids", [1, 2, None, 4, 5, 6, 7, 8, 9], "null at position 2"),
        ("loss_mask", [True] * 5, "5 entries for 6 response tokens"),
        ("generation_log_probs", [0.0] * 7, "7 entries for 6 response tokens"),
        ("generation_log_probs", [0.0, float("nan"), 0.0, 0.0, 0.0, 0.0], "nan at actor token 1"),
        ("span_versions", [3, 4], "3 entries, and span_versions has 2"),
        ("span_starts", [0, 1, 3], "version spans do not partition the actor tokens"),
        ("span_ends", [1, 2, 7], "of 6 response tokens"),
        ("reward", None, "null"),
    ],
)
def test_er_03_a_wrong_row_is_named_with_its_file_and_column(
    column: str, value: Any, what: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "e.parquet", change(column, value))
    rows = read_records(path)
    assert next(rows).trajectory == 0
    with pytest.raises(RealError, match=what) as refused:
        next(rows)
    said = str(refused.value)
    about = {"token_ids": ("token_ids", "loss_mask"), "span_versions": ("span_starts",), "span_ends": ("span_starts",)}
    assert any(said.startswith(f"{path}: column {c}, row 1: ") for c in about.get(column, (column,))), said


@pytest.mark.parametrize(
    ("more", "column", "what"),
    [
        ({"routed_experts": [[0] * 32], "routed_layers": [2], "routed_top_k": [3]}, "routed_experts", "no multiple of"),
        (
            {"routed_experts": [[0] * 36], "routed_layers": [2], "routed_top_k": [2]},
            "routed_experts",
            "9 entries for 8",
        ),
        ({"routed_experts": [[0] * 32], "routed_layers": [2], "routed_top_k": [None]}, "routed_layers", "top_k None"),
        ({"turn_starts": [[4]], "turn_ends": [[7]]}, "turn_starts", r"turn \[4, 7\) of 6"),
        ({"old_log_probs": [[0.0] * 5]}, "old_log_probs", "5 entries for 6"),
        ({"extra.teacher": [[0.0] * 5]}, "extra.teacher", "5 entries for 6"),
        ({"finish_reason": [None]}, "finish_reason", "null"),
    ],
)
def test_er_03_optional_columns_must_agree_too(more: dict[str, Any], column: str, what: str, tmp_path: Path) -> None:
    typed = {k: pa.array(v, REQUIRED.get(k) or OPTIONAL.get(k, pa.list_(pa.float32()))) for k, v in more.items()}
    path = written(tmp_path / "e.parquet", columns(record()) | typed)
    with pytest.raises(RealError, match=what) as refused:
        list(read_records(path))
    assert str(refused.value).startswith(f"{path}: column {column}, row 0: ")


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (
            {"response": ["some text"]},
            "column response is not of the layout; a signal per token is called extra.response",
        ),
        ({"loss_masks": [[True]]}, "column loss_masks is not of the layout; did you mean loss_mask?"),
        ({"token_ids": ["1 2 3"]}, r"column token_ids is string, expected list<.*int32>"),
        ({"loss_mask": [[1, 1, 0, 0, 1, 1]]}, r"column loss_mask is list<.*int64>, expected list<.*bool>"),
        ({"extra.teacher": [["a"]]}, r"column extra.teacher is list<.*string>, expected list<.*float>"),
        ({"spans": None, "span_ends": None}, r"column span_ends is missing \(list<.*int32>\); there are"),
        ({"turn_starts": [[0]]}, "column turn_starts without turn_ends"),
    ],
)
def test_er_01_other_columns_and_types_are_refused_at_once(changes: dict[str, Any], what: str, tmp_path: Path) -> None:
    values = {k: v for k, v in (columns(record()) | changes).items() if v is not None}
    path = written(tmp_path / "e.parquet", values)
    with pytest.raises(RealError, match=what) as refused:
        read_records(path)
    assert str(refused.value).startswith(f"{path}: ")


def test_what_is_no_file_of_this_layout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RealError, match=r"absent\.parquet: there is no such file"):
        read_records(tmp_path / "absent.parquet")
    (tmp_path / "text.parquet").write_text("trajectory,group\n")
    with pytest.raises(RealError, match=r"text\.parquet: no Parquet file"):
        read_records(tmp_path / "text.parquet")
    later = pa.table(columns(record())).replace_schema_metadata({b"testbed-experience": b"2"})
    pq.write_table(later, tmp_path / "later.parquet")
    with pytest.raises(RealError, match="layout version '2'; this release reads 1"):
        read_records(tmp_path / "later.parquet")


def test_a_record_that_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "e.parquet"
    write_records(path, [record()])
    for wrong, what in (
        ([record(), record()], "column trajectory, row 1: 0 is there twice"),
        (
            [replace(record(), old_log_probs=np.zeros(6))],
            "column old_log_probs, row 0: float64 values, expected float32",
        ),
        ([replace(record(), spans=())], "column span_starts, row 0: .*partition"),
    ):
        with pytest.raises(RealError, match=what):
            write_records(path, wrong)
    assert len(list(read_records(path))) == 1, "the file that was there is untouched"
    with pytest.raises(RealError, match="cannot be written"):
        write_records(tmp_path / "no" / "folder.parquet", [])


def test_the_documented_columns_are_those_of_the_layout() -> None:
    page = (REPOSITORY / "docs" / "experience-format.md").read_text()
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| `")]
    documented = {
        name: cell.strip() for names, cell in rows for name in names.replace("`", "").replace(",", "").split()
    }
    kinds = {"float": "float32", "double": "float64"}
    for name, kind in {**REQUIRED, **OPTIONAL}.items():
        inner = kind.value_type if pa.types.is_list(kind) else kind
        plain = kinds.get(str(inner), str(inner))
        assert documented.pop(name) == (f"list<{plain}>" if pa.types.is_list(kind) else plain), name
    assert documented == {"extra.NAME": "list<float32>"}


def test_er_02_the_documented_example_is_a_file_of_this_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (REPOSITORY / "docs" / "experience-format.md").read_text()
    monkeypatch.chdir(tmp_path)
    for block in page.split("```python\n")[1:]:
        exec(block.split("```")[0], {})
    [first], [again] = read_records("rollouts.parquet"), read_records("again.parquet")
    assert same(first, again)
    assert first.spans == ((3, 0, 2), (4, 4, 5)) and first.token_ids[first.prompt_tokens :].tolist()[:2] == [101, 202]
