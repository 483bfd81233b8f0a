"""Transition tables of the five state machines: trajectory, program, group, engine under a weight update, GPU pool.

The tables are the documentation: state -> input -> next state. Anything that is not in a table cannot happen, and
raises `IllegalTransition`. This module knows no data and decides nothing."""

from __future__ import annotations

from typing import Final

from testbed.core.errors import IllegalTransition

Table = dict[str, dict[str, str]]

TRAJECTORY: Final[Table] = {
    # admitted, its tool environment is being prepared
    "preparing": {"environment_ready": "queued", "abort": "aborted", "fail": "failed"},
    # wants an engine
    "queued": {"start_turn": "generating", "abort": "aborted", "fail": "failed"},
    # a model call is in an engine
    "generating": {
        "turn_continues": "acting",
        "turn_ends": "generated",
        "turn_lost": "queued",
        "abort": "aborted",
        "fail": "failed",
    },
    # a tool runs; no decode slot is held
    "acting": {"tool_finished": "queued", "abort": "aborted", "fail": "failed"},
    # all turns are done; signals are missing
    "generated": {"signals_complete": "ready", "drop": "dropped", "abort": "aborted", "fail": "failed"},
    "ready": {"take": "training", "drop": "dropped", "abort": "aborted"},
    # in a batch that is being trained; a reused trajectory goes back to ready
    "training": {"batch_done": "trained", "reuse": "ready"},
    "trained": {},
    "dropped": {},
    "aborted": {},
    "failed": {},
}

PROGRAM: Final[Table] = {
    # waits to be let in; it has no KV yet
    "new": {"restore": "reasoning", "end": "terminated"},
    # wants a model call or is in one
    "reasoning": {"act": "acting", "mark": "marked", "pause": "paused", "end": "terminated"},
    # the same, and it pauses when its next tool starts
    "marked": {"act": "paused_acting", "end": "terminated"},
    # its tool runs; its KV is kept
    "acting": {"reason": "reasoning", "pause": "paused_acting", "end": "terminated"},
    # wants a model call and gets none; its KV may go. A call that was taken back may have ended before
    "paused": {"restore": "reasoning", "act": "paused_acting", "end": "terminated"},
    # its tool runs, and its KV may go
    "paused_acting": {"reason": "paused", "restore": "acting", "end": "terminated"},
    "terminated": {},
}

GROUP: Final[Table] = {
    # a task was asked for
    "drawing": {"task_arrived": "generating", "abort": "aborted"},
    "generating": {"all_generated": "generated", "abort": "aborted", "drop": "dropped"},
    # every member is generated; signals are missing
    "generated": {"all_ready": "ready", "abort": "aborted", "drop": "dropped"},
    "ready": {"take": "training", "drop": "dropped", "abort": "aborted"},
    "training": {"batch_done": "trained", "reuse": "ready"},
    "trained": {},
    "dropped": {},
    "aborted": {},
}

ENGINE: Final[Table] = {
    "serving": {"begin": "draining", "lose": "lost", "leave": "away"},
    # takes no new turns; those in flight end first (`finish`), or the pause is on its way
    "draining": {"pause": "pausing", "cancel": "serving", "lose": "lost"},
    # a pause that failed leaves the engine as it was; resuming it makes sure
    "pausing": {"paused": "paused", "restore": "resuming", "lose": "lost"},
    "paused": {"copy": "copying", "restore": "resuming", "lose": "lost"},
    "copying": {"copied": "copied", "restore": "resuming", "copy": "copying", "lose": "lost"},
    # copied is not ready: the conversion is still to come
    "copied": {"requantize": "requantizing", "agree": "ready", "restore": "resuming", "lose": "lost"},
    "requantizing": {"agree": "ready", "restore": "resuming", "copy": "copying", "lose": "lost"},
    # ready is not resumed: the barrier is still to come
    "ready": {"barrier": "resuming", "restore": "resuming", "lose": "lost"},
    "resuming": {"resumed": "serving", "lose": "lost"},
    # its GPUs train at the moment
    "away": {"return": "serving", "lose": "lost"},
    # it comes back, to its pool's phase
    "lost": {"join": "serving", "join_away": "away"},
}

POOL: Final[Table] = {
    "generate": {"drain": "draining", "switch": "to_train"},
    # in-flight turns on its engines are being taken back
    "draining": {"switch": "to_train"},
    "to_train": {"switched": "train"},
    "train": {"switch": "to_generate"},
    "to_generate": {"switched": "generate"},
}

MACHINES: Final[dict[str, Table]] = {
    "trajectory": TRAJECTORY,
    "program": PROGRAM,
    "group": GROUP,
    "engine": ENGINE,
    "pool": POOL,
}


def step(machine: str, who: object, state: str, given: str) -> str:
    """Next state. Raises `IllegalTransition` if the machine's table has none."""
    table = MACHINES[machine]
    try:
        return table[state][given]
    except KeyError:
        raise IllegalTransition(machine, who, state, given, table) from None
