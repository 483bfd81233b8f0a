"""Quantities of a scenario by name: those of a simulated run, and those that a model answers without one.

What a table of published numbers asks for. It refuses to know what was published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from sim.coefficients import Coefficients
from sim.driver import Progress
from sim.run import simulate
from sim.trainer import TrainerModel, flops_per_token
from sim.weight_paths import WeightPaths
from testbed.commands.errors import RunFailed
from testbed.metrics.summary import RunSummary
from testbed.scenario import Scenario
from testbed.scenario.catalogue import gpu_spec, model_spec
from testbed.scenario.layout import layout_of
from testbed.scenario.workload import FixedLength, LengthsWorkload

GENERATING = ("generate", "generate_tail", "idle_longest", "recompute_kv", "generate_dropped")
"""Causes of a shared pool's generation phase."""

PATHS = ("broadcast", "p2p", "disk", "disk_delta", "cuda_ipc")
PARTS = ("prepare_s", "transfer_s", "apply_s", "requantize_s", "total_s")


def seconds_per_step(summary: RunSummary, lane: str, causes: Iterable[str]) -> float:
    """Wall seconds per step that the GPUs of a lane spend on these causes, mean over its GPUs."""
    pools = [p for p in summary.pools if p.lane == lane]
    spent = sum(p.gpu_seconds.get(cause, 0.0) for p in pools for cause in causes)
    return spent / sum(p.gpus for p in pools) / summary.measured_steps


def _trainer_waits(summary: RunSummary) -> float:
    return seconds_per_step(summary, "trainer", ("idle_data",)) / summary.step_time_mean_s


def _time_to_first_token(summary: RunSummary) -> float:
    """Of single-turn trajectories: from their submission on."""
    t = summary.trajectory
    return t.environment + t.queue + t.paused + t.prefill


def _decode_tokens_per_s(summary: RunSummary) -> float:
    """Of one sequence of single-turn trajectories, from its first token to its last."""
    return (summary.output_length.mean - 1) / summary.trajectory.decode


def _turns_per_min(summary: RunSummary) -> float:
    """Model calls of programs. Raises ValueError for a workload of single calls."""
    if summary.programs is None:
        raise ValueError("`turns_per_min` needs a workload of several turns")
    return summary.programs.turns_per_min


OF_A_RUN: dict[str, Callable[[RunSummary], float]] = {
    "step_time_s": lambda s: s.step_time_mean_s,
    "generation_s": lambda s: seconds_per_step(s, "shared", GENERATING),
    "generation_share": lambda s: seconds_per_step(s, "shared", GENERATING) / s.step_time_mean_s,
    "shared_train_s": lambda s: seconds_per_step(s, "shared", ("train",)),
    "shared_signals_s": lambda s: seconds_per_step(s, "shared", ("signals",)),
    "trainer_train_s": lambda s: seconds_per_step(s, "trainer", ("train",)),
    "trainer_waits_s": lambda s: seconds_per_step(s, "trainer", ("idle_data",)),
    "trainer_waiting_share": _trainer_waits,
    "time_to_first_token_s": _time_to_first_token,
    "decode_tokens_per_s": _decode_tokens_per_s,
    "cached_share": lambda s: s.kv.cached_tokens / s.kv.prompt_tokens,
    "turns_per_min": _turns_per_min,
    "trajectories_per_s": lambda s: s.trajectories_per_s,
    "generated_tokens_per_s_per_gpu": lambda s: s.generated_tokens_per_s_per_gpu,
    "output_length_mean": lambda s: s.output_length.mean,
    "staleness_mean_trainer_steps": lambda s: s.staleness["trainer_steps"].dequeue.mean,
    "staleness_max_dispatch": lambda s: s.staleness["dispatch"].dequeue.max,
}
"""Of the measured steps of one run."""

OF_A_MODEL: tuple[str, ...] = (
    "train_update_s",
    "train_gflop_per_token",
    *(f"{path}_{part}" for path in PATHS for part in PARTS),
)
"""`train_update_s`: one optimizer update on a batch of equal lengths. `train_gflop_per_token`: forward and backward at
that length. The rest: parts of one publication to all engines by a path, idle links."""


def values(
    scenario: Scenario,
    base_dir: Path,
    names: Iterable[str],
    fitted: Coefficients | None = None,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Each quantity's value. The scenario is run once if one of them needs it.

    `fitted`: coefficients instead of the stored ones, for quantities of a model. Raises `RunFailed` for a run that does
    not come to its end, `ValueError` for a quantity that the scenario does not have.
    """
    wanted = list(names)
    found = {name: model_value(scenario, base_dir, name, fitted) for name in wanted if name in OF_A_MODEL}
    rest = [name for name in wanted if name not in found]
    if rest:
        done = simulate(scenario, base_dir, progress=progress)
        if done.problem == "interrupted":
            raise KeyboardInterrupt
        if done.problem:
            raise RunFailed(f"{scenario.name}: {done.problem}")
        found |= {name: OF_A_RUN[name](done.summary) for name in rest}
    return found


def model_value(scenario: Scenario, base_dir: Path, name: str, fitted: Coefficients | None = None) -> float:
    """One of `OF_A_MODEL`."""
    layout, model, gpu = layout_of(scenario), model_spec(scenario.model, base_dir), gpu_spec(scenario.cluster.gpu)
    if name == "train_update_s":
        lengths = [_trajectory_tokens(scenario)] * scenario.algorithm.trajectories_per_batch
        return TrainerModel(scenario, layout, model, gpu, fitted).update_seconds(lengths, 1)[0]
    if name == "train_gflop_per_token":
        return flops_per_token(model, _trajectory_tokens(scenario)) / 1e9
    path = next(p for p in sorted(PATHS, key=len, reverse=True) if name.startswith(f"{p}_"))
    cost = WeightPaths(scenario, layout, model, gpu, fitted=fitted).expected(path)
    return float(getattr(cost, name.removeprefix(f"{path}_")))


def _trajectory_tokens(scenario: Scenario) -> int:
    w = scenario.workload
    if not isinstance(w, LengthsWorkload) or not (
        isinstance(w.prompt, FixedLength) and isinstance(w.reply, FixedLength)
    ):
        raise ValueError(f"training quantities need prompts and replies of fixed length, {scenario.name} has others")
    return w.prompt.tokens + w.reply.tokens
