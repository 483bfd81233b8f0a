"""Can new weights reach the engines: path against placement, transition against admission and KV, and precisions."""

from __future__ import annotations

from collections.abc import Iterator

from testbed.scenario.errors import Fault
from testbed.scenario.precisions import PLAIN, computed_in, training_for, why_refused
from testbed.scenario.rollout import BoundedStaleness, FullyAsync
from testbed.scenario.rules.context import Context
from testbed.scenario.weights import CheapestPath, FixedPath, Waves

ALLOWED_PATHS: dict[str, tuple[str, ...]] = {
    "colocated": ("cuda_ipc", "disk"),
    "disaggregated": ("broadcast", "p2p", "disk", "disk_delta"),
    "hybrid": ("broadcast", "p2p", "disk", "disk_delta", "cuda_ipc"),
}
"""Placement -> weight paths, the usual one first. A hybrid pool's own engines may take cuda_ipc."""

WHY_NOT: dict[str, str] = {
    "cuda_ipc": "hands over GPU memory, so trainer and engine must share the GPU",
    "broadcast": "needs engines on other GPUs than the trainer's",
    "p2p": "needs engines on other GPUs than the trainer's",
    "disk_delta": "patches a checkpoint while engines serve; engines that share the trainer's GPUs do not serve then",
}

ENGINE_PRECISION = "rollout.engine.weight_precision"

BLOCK_SCALED = ("mxfp8", "nvfp4")
"""Formats whose products need Blackwell's tensor cores."""


def path_fits_placement(c: Context) -> Iterator[Fault]:
    """The path exists between the trainer's GPUs and the engines'."""
    path, mode = c.scenario.weights.path, c.scenario.placement.mode
    allowed = ALLOWED_PATHS[mode]
    if isinstance(path, FixedPath) and path.update_weight_transfer_mode not in allowed:
        chosen = path.update_weight_transfer_mode
        what = f"`{chosen}` on a {mode} placement: it {WHY_NOT[chosen]}"
        key = "weights.path.update_weight_transfer_mode"
        yield Fault(key, what, f"{key}: {allowed[0]}")
    if isinstance(path, CheapestPath) and not set(path.among) & set(allowed):
        among = ", ".join(path.among) or "nothing"
        yield Fault(
            "weights.path.among",
            f"no path among {among} exists on a {mode} placement",
            f"weights.path.among: [{', '.join(allowed)}]",
        )


def in_place_keeps_kv(c: Context) -> Iterator[Fault]:
    """A request that goes on with its KV cannot have it flushed (SGLang refuses a flush while a batch exists)."""
    t = c.scenario.weights.transition
    if t.pause_generation_mode == "in_place" and t.kv == "flush":
        what = "`in_place` goes on with the KV it has, and `flush` is refused by an engine that still holds a batch"
        near = "{pause_generation_mode: in_place, kv: salt_by_version}, or {pause_generation_mode: retract, kv: flush}"
        yield Fault("weights.transition.kv", what, near)


def abort_makes_progress(c: Context) -> Iterator[Fault]:
    """Asynchronous generation thrown away at every update starves: long replies never end between two updates."""
    a = c.scenario.rollout.admission
    ahead = isinstance(a, FullyAsync) or (isinstance(a, BoundedStaleness) and a.max_head_offpolicyness > 0)
    if ahead and c.scenario.weights.transition.pause_generation_mode == "abort":
        key = "weights.transition.pause_generation_mode"
        what = (
            f"`abort` with `{a.type}` starves: every update throws away the replies in flight, and long ones never end"
        )
        yield Fault(key, what, f"{key}: retract")


def waves_within_engines(c: Context) -> Iterator[Fault]:
    """A wave has at most as many engines as there are."""
    p = c.scenario.weights.participation
    if isinstance(p, Waves) and p.size > max(1, c.num_engines):
        what = f"waves of {p.size} engines, and there are {c.num_engines}"
        yield Fault("weights.participation.size", what, f"weights.participation.size: {max(1, c.num_engines // 2)}")


def training_matches_engine(c: Context) -> Iterator[Fault]:
    """The precisions are a pair with a recipe: NVFP4 generation with BF16 training is not the NVFP4 recipe."""
    engine, training = c.scenario.rollout.engine.weight_precision, c.scenario.training.precision
    allowed = training_for(engine)
    if training in allowed:
        return
    what = f"{engine} engines go with {' or '.join(allowed)} training, not {training}: {why_refused(engine, training)}"
    key = "training.precision"
    also = "" if c.scenario.weights.requantize == "none" else " with weights.requantize: none"
    near = f"{key}: {allowed[0]}, or {ENGINE_PRECISION}: {training}{also}"
    yield Fault(key, what, near, see=ENGINE_PRECISION)


def requantized_as_served(c: Context) -> Iterator[Fault]:
    """Weights arrive as trained and are converted to what the engine serves, and to nothing else."""
    engine, training = c.scenario.rollout.engine.weight_precision, c.scenario.training.precision
    how = c.scenario.weights.requantize
    needed = engine if engine not in PLAIN and engine != training else "none"
    if how == needed or (how == engine and engine == training):
        return
    key = "weights.requantize"
    if how == "none":
        what = f"{training} weights reach engines that serve {engine}: they must be converted"
        yield Fault(key, what, f"{key}: {needed}", see=ENGINE_PRECISION)
    else:
        yield Fault(key, f"`{how}` after the copy, but the engines serve {engine}", f"{key}: {needed}")


def gpu_has_precision(c: Context) -> Iterator[Fault]:
    """Block formats (MXFP8, NVFP4) need Blackwell tensor cores. A CPU has none for any format: it emulates all."""
    gpu = c.scenario.cluster.gpu
    for key, precision in (
        ("rollout.engine.weight_precision", c.scenario.rollout.engine.weight_precision),
        ("training.precision", c.scenario.training.precision),
    ):
        if precision in BLOCK_SCALED and gpu not in ("B200", "CPU"):
            yield Fault(key, f"{gpu} has no {precision} tensor cores", "cluster.gpu: B200")


def formats_are_emulated(c: Context) -> Iterator[str]:
    """A format that no unit of the machine computes in changes values, and neither speed nor memory."""
    precisions = c.scenario.rollout.engine.weight_precision, c.scenario.training.precision
    formats = dict.fromkeys(p for p in precisions if p not in PLAIN)
    if formats and c.scenario.cluster.gpu == "CPU":
        named = " and ".join(formats)
        yield (
            f"{named} on a CPU is emulated: weights are rounded to the format and back, arithmetic and memory stay "
            f"{computed_in(c.scenario.training.precision)}, so a real run shows agreement and no saving of time"
        )
