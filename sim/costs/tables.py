"""Tables of SGLang step latencies (computed from measured kernel tables), read from CSV files.

The bundled one is of SGLang 0.5.14 on H100 and H200; tables of other engines come from `sim.costs.tabulate`. It refuses
to know what is asked between the rows: `measured` interpolates.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from functools import lru_cache
from importlib.resources import files
from math import log

from msgspec import Struct

from sim.costs.errors import CostModelError
from testbed.scenario.catalogue import ModelSpec, model_preset

TABLE = "aiconfigurator_sglang_step_latency_h100_h200.csv"
SYSTEMS = {"H100": "h100_sxm", "H200": "h200_sxm"}
WEIGHT_PRECISION = {"DeepSeek-V3": "fp8"}
"""Precision of a model's rows where it is not bf16. KV is bf16 throughout."""
Key = tuple[str, str, int]
"""(GPU or system, model, tensor-parallel size)"""


class StepTable(Struct, frozen=True):
    """Rows of one engine kind, seconds; decode by (context per sequence, batch), prefill by (prompts, tokens of
    each)."""

    expert_parallel: int | None
    decode: dict[tuple[int, int], float]
    prefill: dict[tuple[int, int], float]


@lru_cache(maxsize=1)
def step_tables() -> dict[Key, StepTable]:
    """All tables of the bundled file."""
    gpus = {system: gpu for gpu, system in SYSTEMS.items()}
    with (files("testbed") / "data" / TABLE).open(encoding="utf-8") as f:
        return {(gpus[system], name.split("/")[-1], tp): t for (system, name, tp), t in read_tables(f).items()}


def read_tables(lines: Iterable[str]) -> dict[Key, StepTable]:
    """Tables of a CSV file by (system, model, TP) as written there (columns: `testbed/data/README.md`).

    Raises `KeyError` or `ValueError` if it is not such a file.
    """
    tables: dict[Key, StepTable] = {}
    for r in csv.DictReader(lines):
        key = (r["system"], r["model"], int(r["tp_size"]))
        if key not in tables:
            tables[key] = StepTable(int(float(r["moe_ep_size"])) if r["moe_ep_size"] else None, {}, {})
        batch, tokens, seconds = int(r["batch_size"]), int(r["context_tokens"]), float(r["latency_ms"]) * 1e-3
        if r["phase"] == "decode_step":
            tables[key].decode[tokens, batch] = seconds
        else:
            tables[key].prefill[batch, tokens] = seconds
    return tables


def find_table(model: ModelSpec, gpu: str, tensor_parallel: int, precision: str, kv_dtype: str) -> StepTable:
    """The rows of this engine kind. Raises `CostModelError` that names the nearest one the table has."""
    tables = step_tables()
    name = next((k[1] for k in tables if k[1].lower() == model.name.lower()), None)
    asked = f"{model.name} in {precision} with {kv_dtype} KV on {gpu}, TP {tensor_parallel}"
    key = (gpu, name or "", tensor_parallel)
    if key in tables and precision == WEIGHT_PRECISION.get(key[1], "bf16") and kv_dtype == "bf16":
        return tables[key]
    near = min(tables, key=lambda k: _distance(k, model, gpu, tensor_parallel))
    fits = f"{near[1]} in {WEIGHT_PRECISION.get(near[1], 'bf16')} with bf16 KV on {near[0]}, TP {near[2]}"
    raise CostModelError(
        f"the table of measured steps has no {asked}", f"{fits}; or `engine_costs: {{type: analytic}}`"
    )


def _distance(key: Key, model: ModelSpec, gpu: str, tensor_parallel: int) -> tuple[float, bool, float]:
    """Same model first (else the nearest in active parameters), then the same GPU, then the nearest split."""
    size = abs(log(model_preset(key[1]).active_params / model.active_params))
    return (0.0 if key[1].lower() == model.name.lower() else size), key[0] != gpu, abs(log(key[2] / tensor_parallel))
