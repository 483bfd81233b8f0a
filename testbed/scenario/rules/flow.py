"""Does experience flow: admission against placement, buffer against admission, staleness, one throttle a resource."""

from __future__ import annotations

import math
from collections.abc import Iterator

from testbed.scenario.errors import Fault
from testbed.scenario.experience import FreshestFirst, InsertWhenReady, OldestFirst
from testbed.scenario.placement import Colocated, Disaggregated
from testbed.scenario.programs import ThunderAgent
from testbed.scenario.rollout import (
    AimdConcurrency,
    FixedConcurrency,
    FullyAsync,
    GroupLength,
    OverSampling,
    PerEngineConcurrency,
    Unlimited,
)
from testbed.scenario.routing import SessionAffinity
from testbed.scenario.rules.context import Context
from testbed.scenario.weights import FixedPath

ADMISSION = "rollout.admission.type"


def colocated_is_synchronous(c: Context) -> Iterator[Fault]:
    """A pool that takes turns cannot generate the next batch while it trains this one."""
    if not isinstance(c.scenario.placement, Colocated) or c.synchronous:
        return
    kind = c.scenario.rollout.admission.type
    what = f"`{kind}` generates while the trainer works, but a colocated pool cannot generate while it trains"
    near = "rollout.admission: {type: sync}"
    split = c.split_of(c.total_gpus, 0.5)
    if split:
        engine = f"rollout_num_gpus_per_engine: {c.engine_gpus}"
        path = c.scenario.weights.path
        ipc = isinstance(path, FixedPath) and path.update_weight_transfer_mode == "cuda_ipc"
        over = " with weights.path.update_weight_transfer_mode: broadcast" if ipc else ""
        near = f"placement: {{mode: disaggregated, {split}, {engine}}}{over}, or {near}"
    yield Fault(ADMISSION, what, near)


def buffer_holds_a_batch(c: Context) -> Iterator[Fault]:
    """Capacity below groups per batch x (bound + 1) deadlocks: the buffer is full and no batch can be formed."""
    buffer, b = c.scenario.experience.buffer, c.batch
    if isinstance(buffer, InsertWhenReady):
        factor = buffer.async_data_buffer_capacity_factor
        capacity = math.floor(factor * b)
        if capacity < b:
            what = f"deadlock: a buffer of floor({factor:g} x {b}) = {capacity} groups never holds a batch of {b}"
            key = "experience.buffer.async_data_buffer_capacity_factor"
            yield Fault(key, what, f"{key}: 1")
        return
    ratio = _over_sampling_ratio(c)
    need = b * (c.versions_ahead + 1) if ratio is None else math.ceil(ratio * b)
    slots = buffer.max_buffered_groups or b * ((c.scenario.experience.staleness.bound or 0) + 1)
    if slots >= need:
        return
    key = "experience.buffer.max_buffered_groups"
    if ratio is not None:
        what = f"a round starts {ratio:g} x {b} = {need} groups and each reserves a slot; there are {slots}"
        yield Fault(key, what, f"{key}: {need}")
        return
    what = (
        f"deadlock: {b} groups per batch x (bound {c.versions_ahead} + 1) = {need} slots are needed, there are {slots}"
    )
    lower = slots // b - 1
    near = f"{key}: {need}" + (f", or experience.staleness.bound: {lower}" if lower >= 0 else "")
    yield Fault(key, what, near)


def _over_sampling_ratio(c: Context) -> float | None:
    a = c.scenario.rollout.admission
    return a.over_sampling_ratio if isinstance(a, OverSampling) else None


def one_throttle(c: Context) -> Iterator[Fault]:
    """Trajectories in flight are limited once: by groups in admission, or by turns in concurrency."""
    a, k = c.scenario.rollout.admission, c.scenario.rollout.concurrency
    if isinstance(a, FullyAsync) and a.async_max_concurrent_groups is not None and isinstance(k, FixedConcurrency):
        n = c.scenario.algorithm.n_samples_per_prompt
        what = (
            f"two throttles on one resource: {a.async_max_concurrent_groups} groups x {n} here, "
            f"and {k.max_concurrent} turns in rollout.concurrency"
        )
        near = "rollout.concurrency: {type: unlimited}, or rollout.admission: {type: fully_async}"
        yield Fault("rollout.admission.async_max_concurrent_groups", what, near)


def programs_have_one_throttle(c: Context) -> Iterator[Fault]:
    """KV pressure is answered once: by programs, or by turns in flight."""
    r = c.scenario.rollout
    if isinstance(r.programs, ThunderAgent) and isinstance(r.concurrency, AimdConcurrency):
        what = "two throttles on one resource: `thunder_agent` pauses programs by KV, and `kv_aimd` limits turns by it"
        yield Fault("rollout.concurrency.type", what, "rollout.concurrency: {type: unlimited}")


def programs_have_a_place(c: Context) -> Iterator[Fault]:
    """A program's KV lies in one engine, where its calls go."""
    r = c.scenario.rollout
    if not isinstance(r.programs, ThunderAgent):
        return
    if not isinstance(r.routing, SessionAffinity):
        what = f"`thunder_agent` chooses the engine of a program, and `{r.routing.type}` would send its calls elsewhere"
        yield Fault("rollout.routing.type", what, "rollout.routing: {type: session_affinity}", see="rollout.programs")
    if r.engine.disable_radix_cache:
        what = "`thunder_agent` keeps programs' KV between calls, and rollout.engine.disable_radix_cache keeps none"
        yield Fault("rollout.programs.type", what, "rollout.engine.disable_radix_cache: false")
    p = c.scenario.placement
    if isinstance(p, Disaggregated) and p.pd_disaggregation is not None:
        what = "`thunder_agent` counts the KV of a program in one engine; prefill and decode engines both hold it"
        yield Fault("rollout.programs.type", what, "placement.pd_disaggregation: null")


def every_program_comes_back(c: Context) -> Iterator[Fault]:
    """Shortest first lets a long program wait for as long as shorter ones come; a batch in turn waits for it."""
    p, order = c.scenario.rollout.programs, c.scenario.experience.selection.order
    if not isinstance(p, ThunderAgent) or not isinstance(order, OldestFirst) or c.synchronous:
        return
    if p.restore_order == "shortest_first" and p.forced_restore_s is None:
        what = (
            "`oldest_first` waits for the oldest program, which `shortest_first` may never restore while new ones come"
        )
        key = "rollout.programs.forced_restore_s"
        yield Fault(key, what, f"{key}: 1800, or experience.selection.order: {{type: fifo}}")


def redundant_members_are_compared(c: Context) -> Iterator[Fault]:
    """A member is worth nothing without the others only where they are compared."""
    a, extra = c.scenario.algorithm, c.scenario.rollout.redundant_members
    if extra and not a.group_ready_together:
        what = f"advantage `{a.advantage}` trains members singly: {extra} more of them would simply be more"
        key = "rollout.redundant_members"
        yield Fault(key, what, f"{key}: 0, or algorithm.n_samples_per_prompt: {a.n_samples_per_prompt + extra}")


def order_needs_a_line(c: Context) -> Iterator[Fault]:
    """Turns that all run at once have no order."""
    r = c.scenario.rollout
    if isinstance(r.turn_order, GroupLength) and isinstance(r.concurrency, Unlimited):
        what = "`unlimited` concurrency sends every turn at once, and no order is left to choose"
        near = f"rollout.concurrency: {{type: per_engine, max_concurrent_per_engine: {r.engine.max_running_requests}}}"
        yield Fault("rollout.turn_order.type", what, near, see="rollout.concurrency.type")


def taken_back_from_one_engine(c: Context) -> Iterator[Fault]:
    """A prompt that waits for a decode engine is in none."""
    a, p = c.scenario.rollout.admission, c.scenario.placement
    if isinstance(a, OverSampling) and a.partial_rollout and isinstance(p, Disaggregated) and p.pd_disaggregation:
        what = "partial rollout takes calls back from the engine that they are in; a prompt between two is in none"
        yield Fault("rollout.admission.partial_rollout", what, "placement.pd_disaggregation: null")


def what_is_set_aside_is_not_waited_for(c: Context) -> Iterator[Fault]:
    """A round that is over waits for no group; a batch in the order of submission does, and so does a publication."""
    a, e = c.scenario.rollout.admission, c.scenario.experience
    if not isinstance(a, OverSampling) or not a.partial_rollout:
        return
    if not c.scenario.algorithm.group_ready_together:
        what = "deadlock: batches take members singly, also of groups that a round sets aside, and then lack them"
        near = "rollout.admission.partial_rollout: false, or algorithm.advantage: group"
        yield Fault("rollout.admission.partial_rollout", what, near)
    aside = "the oldest group, which partial rollout sets aside until the next batch"
    if isinstance(e.selection.order, OldestFirst):
        what = f"deadlock: `oldest_first` waits for {aside}"
        yield Fault("experience.selection.order.type", what, "experience.selection.order: {type: fifo}")
    if e.staleness.action == "wait":
        what = f"deadlock: `wait` holds the publication for {aside}"
        yield Fault("experience.staleness.action", what, "experience.staleness.action: correct")


def concurrency_lets_a_group_run(c: Context) -> Iterator[Fault]:
    """Fewer slots than members: a group could never be in flight."""
    k, n = c.scenario.rollout.concurrency, c.scenario.algorithm.n_samples_per_prompt
    engines = max(1, c.num_engines)
    key, limit, least = "", n, n
    if isinstance(k, FixedConcurrency):
        key, limit = "max_concurrent", k.max_concurrent
    elif isinstance(k, PerEngineConcurrency):
        key, limit, least = "max_concurrent_per_engine", k.max_concurrent_per_engine * engines, math.ceil(n / engines)
    elif isinstance(k, AimdConcurrency):
        key, limit = "max_inflight", k.max_inflight
    if limit < n:
        key = f"rollout.concurrency.{key}"
        what = f"{limit} turns at once are fewer than the {n} members of a group, which could never be in flight"
        yield Fault(key, what, f"{key}: {least}")


def aimd_in_order(c: Context) -> Iterator[Fault]:
    """The controller's limits and thresholds are ordered."""
    k = c.scenario.rollout.concurrency
    if not isinstance(k, AimdConcurrency):
        return
    if not k.min_inflight <= k.initial_inflight <= k.max_inflight:
        limits = f"min {k.min_inflight} <= initial {k.initial_inflight} <= max {k.max_inflight}"
        what = f"{limits} does not hold"
        inside = max(min(k.min_inflight, k.max_inflight), min(k.initial_inflight, k.max_inflight))
        near = f"rollout.concurrency.initial_inflight: {inside}" if k.min_inflight <= k.max_inflight else ""
        yield Fault("rollout.concurrency.initial_inflight", what, near)
    if not k.grow_below_kv_usage <= k.trim_above_kv_usage:
        what = f"it would grow (below {k.grow_below_kv_usage:g}) and trim (above {k.trim_above_kv_usage:g}) at once"
        yield Fault(
            "rollout.concurrency.grow_below_kv_usage",
            what,
            f"rollout.concurrency.grow_below_kv_usage: {k.trim_above_kv_usage:g}",
        )
    if k.trim_to > k.trim_above_kv_usage:
        what = f"trims to {k.trim_to:g}, above the {k.trim_above_kv_usage:g} at which it trims"
        yield Fault("rollout.concurrency.trim_to", what, f"rollout.concurrency.trim_to: {k.trim_above_kv_usage:g}")


def staleness_action_can_act(c: Context) -> Iterator[Fault]:
    """An action for what is too old needs a bound that says what is."""
    s = c.scenario.experience.staleness
    if s.bound is None and s.action in ("retry", "wait", "mask", "correct"):
        what = f"`{s.action}` never acts: without a bound nothing is too old"
        yield Fault("experience.staleness.action", what, "experience.staleness.bound: 1")


def staleness_event_is_read(c: Context) -> Iterator[Fault]:
    """An event that the action does not look at would be an option without effect."""
    s = c.scenario.experience.staleness
    if s.event == "publication" and s.action not in ("drop", "retry"):
        what = f"before a publication groups in flight are cancelled, which `{s.action}` never does"
    elif s.event == "completion" and s.action in ("wait", "none"):
        what = f"`{s.action}` decides nothing when a group is complete"
    else:
        return
    yield Fault("experience.staleness.event", what, "experience.staleness.event: dequeue, or action: drop")


def waiting_ends(c: Context) -> Iterator[Fault]:
    """`wait` holds a publication until old groups are used: they must get used, not replaced by others as old."""
    s = c.scenario.experience.staleness
    if s.action != "wait" or s.bound is None:
        return
    if isinstance(c.scenario.experience.selection.order, FreshestFirst):
        what = "`wait` holds the publication until the oldest groups are used, and freshest_first leaves them for last"
        yield Fault("experience.selection.order.type", what, "experience.selection.order: {type: oldest_first}")
    elif s.bound == 0 and c.refills:
        kind = c.scenario.rollout.admission.type
        what = f"`wait` with bound 0 never publishes: `{kind}` always has groups of the current version in flight"
        yield Fault(
            "experience.staleness.bound", what, "experience.staleness.bound: 1, or experience.staleness.action: drop"
        )


def reuse_within_bound(c: Context) -> Iterator[Fault]:
    """The k-th use of a group comes k - 1 batches later, and then it must not be too old."""
    s, uses = c.scenario.experience.staleness, c.scenario.experience.selection.use_count
    interval = c.scenario.weights.update_weights_interval
    if s.bound is None or s.action not in ("drop", "retry", "wait"):
        return
    age = (uses - 1) // interval
    if age > s.bound:
        what = f"use {uses} of a group comes {age} or more versions after the first, beyond the bound {s.bound}"
        most = s.bound * interval + interval
        near = f"experience.staleness.bound: {age}, or experience.selection.use_count: {most}"
        yield Fault("experience.selection.use_count", what, near)


def groups_with_variance(c: Context) -> Iterator[Fault]:
    """The zero-variance filter must let groups through."""
    a, rewards = c.scenario.algorithm, c.scenario.workload.rewards
    if not c.scenario.experience.selection.filter_zero_variance:
        return
    key, near = "experience.selection.filter_zero_variance", "experience.selection.filter_zero_variance: false"
    if not a.group_ready_together:
        yield Fault(key, f"advantage `{a.advantage}` compares no groups whose rewards could be equal", near)
    elif a.n_samples_per_prompt == 1:
        yield Fault(
            key,
            "groups of 1 have no variance to filter by",
            f"algorithm.n_samples_per_prompt: 8, or {near}",
        )
    elif c.scenario.workload.type != "journal" and rewards.success_rate in (0.0, 1.0):
        what = f"success_rate {rewards.success_rate:g} makes all rewards equal: every group would be dropped"
        yield Fault(key, what, f"workload.rewards.success_rate: 0.5, or {near}")


def open_arrivals(c: Context) -> Iterator[Fault]:
    """Tasks that arrive by themselves cannot be started in rounds."""
    w = c.scenario.workload
    arrivals = getattr(w, "arrivals", "closed")
    if arrivals != "closed" and isinstance(c.scenario.rollout.admission, OverSampling):
        what = f"a round starts its groups at once; tasks that arrive by themselves (`arrivals: {arrivals}`) cannot"
        yield Fault("workload.arrivals", what, "workload.arrivals: closed")
