"""The stand-in for `sgl_kernel`: its two index helpers against written-out results, and its other names."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

SHIM = Path(__file__).parents[2] / "real" / "engines" / "sglang_cpu_shim" / "sgl_kernel" / "__init__.py"


@pytest.fixture(scope="module")
def shim() -> ModuleType:
    """The module from its file, whatever `sgl_kernel` is installed."""
    spec = importlib.util.spec_from_file_location("sgl_kernel_under_test", SHIM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_slots_are_written_at_each_requests_positions(shim: ModuleType) -> None:
    table = torch.full((4, 6), -1, dtype=torch.int32)
    rows, start, end = torch.tensor([2, 0]), torch.tensor([1, 0]), torch.tensor([4, 2])
    shim.assign_req_to_token_pool_cpu(rows, table, start, end, torch.tensor([10, 11, 12, 20, 21]), 6)
    assert table.tolist() == [
        [20, 21, -1, -1, -1, -1],
        [-1] * 6,
        [-1, 10, 11, 12, -1, -1],
        [-1] * 6,
    ]


def test_moves_read_every_slot_before_any_is_written(shim: ModuleType) -> None:
    keys, values = torch.arange(24, dtype=torch.float32).reshape(6, 4), torch.arange(6, dtype=torch.bfloat16)
    expected = [buffer.clone() for buffer in (keys, values)]
    source, target = torch.tensor([0, 1, 2]), torch.tensor([1, 2, 5])  # 1 and 2 are read and written
    for buffer in expected:
        buffer[target] = buffer[source].clone()
    pointers = torch.tensor([keys.data_ptr(), values.data_ptr()])
    shim.copy_all_layer_kv_cache_cpu(pointers, torch.tensor([4 * 4, 2]), target, source)
    assert torch.equal(keys, expected[0]) and torch.equal(values, expected[1])


def test_a_paused_scheduler_waits_for_a_message(shim: ModuleType) -> None:
    """The method that is hooked is called by the installed SGLang in every turn of a paused loop; then it sleeps."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.origin is not None
    *folders, cls, name = shim.PAUSED.split(".")[1:]
    tree = ast.parse((Path(spec.origin).parent.joinpath(*folders).with_suffix(".py")).read_text())
    [scheduler] = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == cls]
    methods = {n.name: ast.unparse(n) for n in scheduler.body if isinstance(n, ast.FunctionDef)}
    assert name in methods
    for loop in ("event_loop_normal", "event_loop_overlap"):
        called = methods[loop].index(f"self.{name}()")
        assert methods[loop].rindex("if self._engine_paused:", 0, called) > methods[loop].index("while True:")
    slept: list[bool] = []
    idle = type("Scheduler", (), {"maybe_sleep_on_idle": lambda self: slept.append(True)})()
    assert shim.sleep_while_paused(None, idle) is None and slept == [True]


def test_other_cpu_names_can_be_imported_and_not_called(shim: ModuleType) -> None:
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.silu_and_mul_cpu is not in the stand-in"):
        shim.silu_and_mul_cpu(1)
    with pytest.raises(AttributeError):
        _ = shim.silu_and_mul
