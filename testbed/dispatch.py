"""Which part of a backend carries out which action: the same parts in every backend, under the same names.

It refuses to know how they do it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from testbed.core import actions as do

Carry = Callable[[Any], None]


def ignore(_: do.Action) -> None:
    """What asks for nothing."""


def dispatch_table(
    fleet: Any, services: Any, weights: Any, *, set_timer: Carry, finish: Carry
) -> dict[type[do.Action], Carry]:
    """Every kind of action, with what carries it out."""
    return {
        do.StartTurn: fleet.start_turn,
        do.FetchPrefix: fleet.fetch_prefix,
        do.HandOver: fleet.hand_over,
        do.AbortTurn: fleet.abort_turn,
        do.DrawTask: services.draw_task,
        do.PrepareEnvironment: services.prepare_environment,
        do.ReleaseEnvironment: services.release_environment,
        do.RunTool: services.run_tool,
        do.ComputeSignals: services.compute_signals,
        do.Train: services.train,
        do.Retire: services.retire,
        do.PrepareWeights: weights.prepare_weights,
        do.PauseEngine: weights.pause_engine,
        do.CopyWeights: weights.copy_weights,
        do.RequantizeWeights: weights.requantize,
        do.FlushCache: weights.flush_cache,
        do.ResumeEngine: weights.resume_engine,
        do.SwitchPool: weights.switch_pool,
        do.SetTimer: set_timer,
        do.Finish: finish,
        do.Note: ignore,
        do.PauseProgram: ignore,  # the core sends it no call, and the engine evicts what it needs
        do.RestoreProgram: ignore,
    }
