"""Invented run summaries whose numbers add up: lanes close over GPUs × measured time, cost follows from step time.

They are for tests of the reports alone, and results of nothing.
"""

from __future__ import annotations

import random
import zlib

import msgspec

from reports import Comparison, VariantRuns, build_comparison
from testbed.metrics.summary import (
    BufferTime,
    Distribution,
    KvReuse,
    PoolTime,
    RunSummary,
    StalenessReading,
    StepRecord,
    TrajectoryTime,
    Waste,
    WeightUpdate,
)

PRICE, STEPS, GPUS = 2.60, 10, 64
KINDS = {
    "engine_step": "measured",
    "reply_lengths": "calibrated",
    "trainer": "analytic",
    "links": "analytic",
    "tools": "assumed",
    "price": "assumed",
}


def of(histogram: dict[int, int]) -> Distribution:
    """A distribution with the moments of a histogram."""
    values = sorted(v for v, n in histogram.items() for _ in range(n))
    n = len(values)

    def at(q: float) -> float:
        return float(values[min(n - 1, int(q * n))])

    return Distribution(
        count=n,
        mean=sum(values) / n,
        p50=at(0.5),
        p95=at(0.95),
        p99=at(0.99),
        max=float(values[-1]),
        histogram=dict(histogram),
    )


def run(
    name: str,
    lanes: list[tuple[str, str, int, dict[str, float]]],
    *,
    seed: int = 1,
    stretch: float = 1.0,
    completion: dict[int, int] | None = None,
    dequeue: dict[int, int] | None = None,
    bound: int | None = None,
    waste: float = 0.0,
    path: str = "broadcast",
    update: tuple[float, ...] = (3.4, 0.0, 5.9, 2.4, 0.7, 9.0),
    trajectory: tuple[float, ...] = (28, 2, 110, 9, 0, 0, 1, 62, 70),
    hidden: float = 0.0,
    backend: str = "simulated",
    workload: str = "77d0aa41",
    **changes: object,
) -> RunSummary:
    """`lanes`: (name, lane, GPUs, seconds per step by cause); every lane must have the same length.

    `stretch` scales all times.
    """
    lengths = {round(sum(causes.values()), 6) for _, _, _, causes in lanes}
    assert len(lengths) == 1, lengths
    step = lengths.pop() * stretch
    gpus = sum(g for _, _, g, _ in lanes)
    completion, dequeue = completion or {0: 640}, dequeue or {0: 640}
    tokens = 9_000_000
    dropped = int(tokens * waste / (1 - waste))
    reading = StalenessReading(of(completion), of(dequeue))
    prepare, drain, copy, requantize, barrier, pause = update
    aged = reading.dequeue.mean - reading.completion.mean
    fields = dict(
        name=name,
        backend=backend,
        seed=seed,
        scenario_hash=f"{zlib.crc32(name.encode()):08x}c09a",
        workload_hash=f"{workload}{seed}",
        num_gpus=gpus,
        measured_steps=STEPS,
        warmup_steps=2,
        measured_s=step * STEPS,
        wall_s=step * (STEPS + 2),
        step_time=Distribution(count=STEPS, mean=step, p50=step, p95=step * 1.05, p99=step * 1.08, max=step * 1.08),
        step_time_mean_s=step,
        pools=[
            PoolTime(n, lane, g, {c: s * stretch * g * STEPS for c, s in causes.items()})
            for n, lane, g, causes in lanes
        ],
        trained_tokens_per_s_per_gpu=tokens / step / gpus,
        generated_tokens_per_s_per_gpu=(tokens + dropped) / step / gpus,
        trajectories_per_s=1024 / step,
        cost_usd_per_1000_steps=step * gpus * PRICE / 3600 * 1000,
        staleness_measure="oldest_token",
        staleness={"oldest_token": reading},
        staleness_in_generation=reading.completion.mean / reading.dequeue.mean if reading.dequeue.mean else 0.0,
        staleness_in_buffer=aged / reading.dequeue.mean if reading.dequeue.mean else 0.0,
        staleness_bound=bound,
        output_length=Distribution(count=10240, mean=8930, p50=7800, p95=16384, p99=16384, max=16384),
        capped_share=0.11,
        waste=Waste(
            generated_tokens=(tokens + dropped) * STEPS,
            trained_tokens=tokens * STEPS,
            dropped_tokens={"stale": dropped * STEPS} if dropped else {},
            trained_trajectories=10240,
            dropped_trajectories={"stale": int(10240 * waste)} if dropped else {},
        ),
        buffer=BufferTime(empty_s=10.0 * (waste > 0), not_ready_s=5.0 * (waste > 0), too_few_ready_s=2.0 * (waste > 0)),
        kv=KvReuse(prompt_tokens=8_000_000, cached_tokens=6_000_000, recomputed_tokens=400_000, retractions=12),
        weight_update=WeightUpdate(
            count=STEPS,
            path=path,
            prepare_s=prepare,
            drain_s=drain,
            copy_s=copy,
            requantize_s=requantize,
            barrier_s=barrier,
            pause_s=pause,
            total_s=prepare + drain + copy + requantize + barrier,
        ),
        trajectory=TrajectoryTime(*trajectory, total=sum(trajectory)),
        overlap_s_per_step=hidden * step,
        hidden_generation_share=hidden,
        steps=[],
        events=1_000_000,
        backend_events=400_000,
        finish_reason="num_rollout",
        kinds=dict(KINDS) if backend == "simulated" else {k: "measured" for k in KINDS} | {"price": "published"},
        marks={"decode": 0.04},
    )
    return RunSummary(**(fields | changes))


def split(
    engines: dict[str, float], trainer: dict[str, float], e: int = 40, t: int = 24
) -> list[tuple[str, str, int, dict[str, float]]]:
    return [("rollout", "engines", e, engines), ("trainer", "trainer", t, trainer)]


COLOCATED = [
    (
        "shared",
        "shared",
        64,
        {
            "generate": 138.0,
            "generate_tail": 44.0,
            "train": 80.0,
            "signals": 6.0,
            "weight_update": 6.0,
            "phase_switch": 17.0,
            "idle_longest": 37.0,
        },
    )
]
SYNC = split(
    {"generate": 211.0, "generate_tail": 37.0, "weight_update": 9.0, "idle_longest": 31.0, "idle_trainer": 227.0},
    {"train": 222.0, "weight_update": 13.0, "idle_data": 280.0},
)
ONE_STEP = split(
    {"generate": 211.0, "generate_tail": 37.0, "weight_update": 9.0, "idle_longest": 31.0, "idle_trainer": 5.0},
    {"train": 224.0, "weight_update": 12.0, "idle_data": 57.0},
)
ASYNC = split(
    {"generate": 207.0, "generate_tail": 1.0, "weight_update": 9.0, "recompute_kv": 14.0, "generate_dropped": 17.0},
    {"train": 219.0, "weight_update": 12.0, "idle_data": 17.0},
)
LOOSE = split(
    {"generate": 240.0, "generate_tail": 18.0, "weight_update": 2.0, "idle_buffer_full": 7.0}, {"train": 267.0}, 44, 20
)

VARIANTS: list[tuple[str, str, list[tuple[str, str, int, dict[str, float]]], dict[str, object], dict[str, object]]] = [
    (
        "colocated-sync",
        "cuda_ipc",
        COLOCATED,
        {"path": "cuda_ipc", "update": (1.6, 0.0, 1.1, 2.4, 0.4, 5.5), "trajectory": (0, 1, 92, 9, 0, 0, 1, 50, 75)},
        {},
    ),
    ("split 40 + 24, sync", "broadcast · nothing in flight", SYNC, {}, {"placement.mode": "disaggregated"}),
    (
        "split 40 + 24, one-step",
        "broadcast · nothing in flight",
        ONE_STEP,
        {"dequeue": {1: 640}, "bound": 1, "hidden": 0.7, "trajectory": (28, 2, 110, 9, 0, 0, 1, 62, 83)},
        {"placement.mode": "disaggregated", "rollout.admission.type": "one_step_ahead"},
    ),
    (
        "async η = 2, 40 + 24",
        "broadcast · retract, flush",
        ASYNC,
        {
            "completion": {0: 106, 1: 489, 2: 45},
            "dequeue": {1: 115, 2: 525},
            "bound": 2,
            "waste": 0.074,
            "hidden": 0.94,
            "trajectory": (3, 4, 121, 9, 0, 2, 1, 74, 128),
        },
        {"placement.mode": "disaggregated", "experience.staleness.bound": 2, "weights.transition.kv": "flush"},
    ),
    (
        "async η = 4, 44 + 20",
        "disk_delta · in_place, keep",
        LOOSE,
        {
            "completion": {0: 171, 1: 468, 2: 1},
            "dequeue": {0: 20, 1: 141, 2: 244, 3: 225, 4: 10},
            "bound": 4,
            "hidden": 0.99,
            "path": "disk_delta",
            "update": (14.8, 0.0, 5.1, 1.2, 0.5, 1.7),
            "trajectory": (3, 2, 125, 9, 0, 0, 1, 64, 506),
        },
        {"placement.mode": "disaggregated", "experience.staleness.bound": 4, "weights.transition.kv": "keep"},
    ),
]


def variant(index: int, seeds: int = 5, noise: float = 0.015) -> VariantRuns:
    """One of the five, over seeds whose times differ by about `noise`."""
    name, note, lanes, options, changes = VARIANTS[index]
    rng = random.Random(index)
    runs = [run(name, lanes, seed=s, stretch=1 + noise * rng.uniform(-1, 1), **options) for s in range(1, seeds + 1)]
    return VariantRuns("", name, note, runs, changes)


def comparison(seeds: int = 5, variants: int = 5, **changes: object) -> Comparison:
    """The five variants, then (to twelve) copies of them with other names and slightly longer steps."""
    chosen = [variant(i % 5, seeds) for i in range(variants)]
    for i, v in enumerate(chosen[5:], 5):
        name, _, lanes, options, _ = VARIANTS[i % 5]
        v.name = f"{name}, again {i}"
        v.runs = [run(v.name, lanes, seed=r.seed, stretch=1.05 + 0.01 * i + 0.002 * r.seed, **options) for r in v.runs]
    return build_comparison(
        **{
            "study": "placement_64xh100_qwen3_32b",
            "question": "64 H100, Qwen3-32B, 16k-token replies: which placement, and how much asynchrony?",
            "variants": chosen,
            "command": "testbed compare scenarios/examples/placement_64xh100_qwen3_32b.yaml --seeds 1..5",
            "versions": {"testbed": "0.1.0", "Python": "3.11"},
            "seconds": 41.0,
            "facts": {"price": "USD 2.60 per GPU-hour", "trainer": "roofline, 40 % MFU"},
            **changes,
        }
    )


def learning(run: RunSummary, rewards: list[float]) -> RunSummary:
    """The same run made by engines and trainers that learn: the mean reward of each batch."""
    steps = [
        StepRecord(i, 10.0 * i, 10.0 * (i + 1), {}, 9_000, 9_000, 0.0, 0, reward) for i, reward in enumerate(rewards)
    ]
    kinds = {k: "measured" for k in (*KINDS, "rewards")} | {"price": "assumed"}
    return msgspec.structs.replace(run, backend="real", steps=steps, kinds=kinds, marks={})


def learnt(rewards: dict[str, list[list[float]]], **changes: object) -> Comparison:
    """Real variants by name, each with the rewards of one run per seed."""
    variants = [
        VariantRuns("", name, "", [learning(run(name, COLOCATED, seed=i), x) for i, x in enumerate(seeds, 1)])
        for name, seeds in rewards.items()
    ]
    return build_comparison(**{"study": "s", "question": "q", "variants": variants, "seconds": 41.0, **changes})
