"""Measured serving points: what was measured, of which engine kind, under which launch options.

A point is the mean time to first token (TTFT) and time per output token (TPOT) of a server under a closed loop of
`concurrency` clients with prompts of `isl` and replies of `osl` tokens. This module reads the bundled points and says
which of them can be simulated. It refuses to know how long anything takes (`sim.serving`).
"""

from __future__ import annotations

import csv
from functools import lru_cache
from importlib.resources import files
from typing import Any

import msgspec
from msgspec import Struct

POINTS, ENGINES = "serving_points.csv", "serving_engines.json"

GPUS = {"h100_sxm": "H100", "h200_sxm": "H200"}
GPUS_PER_NODE = 8


class Launch(Struct, frozen=True):
    """Server and client options of a group of points. `kind`: `published` (in the launch scripts) or `default`."""

    backend: str
    models: list[str]
    """Empty: any model."""
    tokens_per_step: int
    """SGLang: chunked_prefill_size and max_prefill_tokens; vLLM: max_num_batched_tokens."""
    memory_share: float
    """mem_fraction_static; gpu-memory-utilization."""
    kind: str
    system: str = ""
    """Empty: any system."""
    async_scheduling: bool = True
    """Whether the host puts the next step together while the device computes (vLLM; SGLang's overlap schedule)."""
    kv_cache: str = "bfloat16"
    """How the KV pool is stored."""
    kv_kernels: str = "bfloat16"
    """As which type attention reads it: the row of the step tables."""
    shortest: float = 1.0
    """Lengths are uniform from this share of isl (osl) to all of it."""


class Served(Struct, frozen=True):
    """What the step tables and the KV pool need to know of a model."""

    architecture: str
    """Its name in the step tables."""
    layers: int
    kv_heads: int
    """0: latent attention, whose KV is on every GPU."""
    kv_values: int
    """Values cached per token: of one KV head, all layers; of all heads for latent attention."""
    weights: dict[str, tuple[str, str | None, float]]
    """By precision: quantisation of dense and of expert weights in the tables' words, and all weights in GB."""


class Engines(Struct, frozen=True):
    models: dict[str, Served]
    launches: list[Launch]


class EngineKind(Struct, frozen=True):
    """What a step table is of."""

    system: str
    backend: str
    model: str
    gemm: str
    moe: str | None
    kv_cache: str
    tp_size: int
    moe_tp_size: int
    moe_ep_size: int


class Point(Struct, frozen=True):
    """One row of the bundled file."""

    id: str
    system: str
    backend: str
    backend_version: str
    model_path: str
    precision: str
    mode: str
    isl: int
    osl: int
    concurrency: int
    """0: not recorded."""
    tp_size: int
    pp_size: int
    attention_dp_size: int
    moe_tp_size: int
    moe_ep_size: int
    measured_date: str
    ttft_ms: float
    tpot_ms: float

    @property
    def fitted(self) -> bool:
        """Whether the overheads of a step are fitted to it: Qwen3-32B, the one model that both engines serve, and
        Llama-3.1-70B on H200, the one dense model under asynchronous scheduling."""
        return self.model == "Qwen3-32B" or (self.model == "Llama-3.1-70B" and self.system == "h200_sxm")

    @property
    def gpu(self) -> str:
        return GPUS[self.system]

    @property
    def model(self) -> str:
        return self.model_path.split("/")[-1]


class Case(Struct, frozen=True):
    """A point that can be asked of the simulator, with what it is served by."""

    point: Point
    kind: EngineKind
    launch: Launch
    layers: int
    weight_bytes: float
    kv_bytes_per_token: float
    """Of one GPU."""


class LeftOut(Struct, frozen=True):
    point: Point
    reason: str


class Answer(Struct, frozen=True):
    """What the simulator says of a point, ms; `bare`: with the step tables alone."""

    id: str
    ttft_ms: float
    tpot_ms: float
    bare_ttft_ms: float
    bare_tpot_ms: float


@lru_cache(maxsize=1)
def engines() -> Engines:
    return msgspec.json.decode((files("testbed") / "data" / ENGINES).read_bytes(), type=Engines)


@lru_cache(maxsize=1)
def points() -> list[Point]:
    """All rows of the bundled file."""
    with (files("testbed") / "data" / POINTS).open(encoding="utf-8") as f:
        return [_point(row) for row in csv.DictReader(f)]


def _point(row: dict[str, str]) -> Point:
    typed: dict[str, Any] = {**row}
    for name in ("isl", "osl", "concurrency", "tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size"):
        typed[name] = int(row[name] or 0)
    for name in ("ttft_ms", "tpot_ms"):
        typed[name] = float(row[name])
    return Point(**typed)


def cases(chosen: list[Point]) -> tuple[list[Case], list[LeftOut]]:
    """Points to simulate, and those that can't be, with the reason. A measurement that is listed twice counts once."""
    found: list[Case] = []
    out: list[LeftOut] = []
    seen: dict[tuple[Any, ...], str] = {}
    for p in chosen:
        reason = _unfit(p)
        same = (p.system, p.backend, p.isl, p.osl, p.concurrency, f"{p.ttft_ms:.2f}", f"{p.tpot_ms:.2f}")
        if not reason and same in seen:
            reason = f"the same measurement as {seen[same]}"
        if reason:
            out.append(LeftOut(p, reason))
            continue
        seen[same] = p.id
        found.append(_case(p))
    return found, out


def _unfit(p: Point) -> str:
    """Why a point can't be simulated; empty if it can."""
    if p.mode == "disagg":
        return "pending: prefill and decode on engines of their own (PD) is not modelled"
    if not p.concurrency:
        return "its concurrency was not recorded"
    if p.tp_size > GPUS_PER_NODE:
        return f"TP {p.tp_size}: more GPUs than a node has, the tables of collectives end there"
    if p.attention_dp_size > 1:
        return "data-parallel attention is not modelled"
    if not p.moe_tp_size:
        return "its split was not recorded"
    served = engines().models.get(p.model_path)
    if served is None or p.precision not in served.weights:
        return f"no step table of {p.model_path} in {p.precision or 'bf16'}"
    if served.weights[p.precision][1] and p.moe_tp_size * p.moe_ep_size != p.tp_size:
        return f"recorded split contradicts itself: TP {p.tp_size}, MoE TP {p.moe_tp_size} x EP {p.moe_ep_size}"
    return ""


def _case(p: Point) -> Case:
    served = engines().models[p.model_path]
    gemm, moe, gigabytes = served.weights[p.precision]
    launch = next(
        x
        for x in engines().launches
        if x.backend == p.backend and x.system in ("", p.system) and (not x.models or p.model_path in x.models)
    )
    split = (p.moe_tp_size, p.moe_ep_size) if moe else (1, 1)
    kind = EngineKind(p.system, p.backend, served.architecture, gemm, moe, launch.kv_kernels, p.tp_size, *split)
    heads = max(served.kv_heads / p.tp_size, 1.0)
    per_token = served.kv_values * heads * (1 if launch.kv_cache == "fp8" else 2)
    return Case(p, kind, launch, served.layers, gigabytes * 1e9, per_token)
