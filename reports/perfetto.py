"""A trace for Perfetto from a run's records: Chrome trace-event JSON, written as a stream.

Tracks: one process per engine (turns as async slices, requests in flight as a counter, pauses), one for the trainer
(train, signals, idle reasons), one per publication of weights, one for pool phases, one for admission and tools. It
refuses to decide anything and to keep what has ended: only what is open is in memory.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from testbed.core import actions as act
from testbed.core import events as ev
from testbed.scenario import Scenario
from testbed.scenario.layout import layout_of

TRAINER, PUBLICATIONS, POOLS, CONTROL, ENGINES = 1, 2, 3, 4, 100
"""Process ids; engine e is ENGINES + e."""
TRAIN, SIGNALS, WAITS = 1, 2, 3
"""Threads of the trainer."""


def write_trace(records: Iterable[tuple[ev.Event, Sequence[act.Action]]], scenario: Scenario, path: Path) -> int:
    """Write the records of one run, in order of time, to `path` (gzip when it ends in `.gz`).

    Returns how many trace events. Trace times are microseconds; what is still open at the end is closed at the last
    time and says `"open": true`.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        with gzip.GzipFile(path, "wb", mtime=0) as raw, io.TextIOWrapper(raw, encoding="utf-8") as out:
            return _Trace(out, scenario).write(records)
    with path.open("w", encoding="utf-8") as out:
        return _Trace(out, scenario).write(records)


class _Trace:
    def __init__(self, out: TextIO, scenario: Scenario) -> None:
        self.out = out
        self.events: list[dict[str, Any]] = []
        self.t = 0.0
        self.layout = layout_of(scenario)
        self.turns: dict[tuple[int, int], dict[str, Any]] = {}
        """(trajectory, turn) -> its begin event."""
        self.in_flight: dict[int, int] = {}
        self.spans: dict[tuple[int, int, str], tuple[float, str, dict[str, Any]]] = {}
        """(process, thread, slot) -> (start, name, args) of an open slice."""
        self.phase: dict[int, str] = {p.index: p.phase for p in self.layout.pools}
        self.updates: dict[int, int] = {}
        """Batch -> optimizer updates to wait for."""
        self.tools = 0
        self.publishing: dict[int, int] = {}
        """Engine -> version that it is being given."""
        self.signals = 0
        self.on_event: dict[type[ev.Event], Callable[[Any], None]] = {
            ev.TurnFinished: self.turn_finished,
            ev.PrefillFinished: self.prefill_finished,
            ev.TurnFailed: self.turn_failed,
            ev.TrainStepFinished: self.train_step_finished,
            ev.SignalReady: self.signal_ready,
            ev.ToolFinished: self.tool_finished,
            ev.WeightsPrepared: lambda e: self.close(PUBLICATIONS, e.version, "prepare", bytes=e.bytes),
            ev.TrainerReleased: lambda e: self.instant(PUBLICATIONS, e.version, "trainer released"),
            ev.EnginePaused: self.engine_paused,
            ev.WeightsCopied: lambda e: self.close(ENGINES + e.engine, 3, "copy"),
            ev.EngineReady: self.engine_ready,
            ev.EngineResumed: self.engine_resumed,
            ev.WeightUpdateFailed: self.update_failed,
            ev.PoolSwitched: self.pool_switched,
            ev.EngineLost: lambda e: self.instant(ENGINES + e.engine, 2, "engine lost"),
            ev.EngineJoined: lambda e: self.instant(ENGINES + e.engine, 2, f"engine joined, version {e.version}"),
            ev.LoadReported: self.load_reported,
        }
        self.on_action: dict[type[act.Action], Callable[[Any], None]] = {
            act.StartTurn: self.start_turn,
            act.HandOver: self.hand_over,
            act.Train: self.train,
            act.ComputeSignals: self.compute_signals,
            act.RunTool: self.run_tool,
            act.PrepareWeights: self.prepare_weights,
            act.PauseEngine: self.pause_engine,
            act.CopyWeights: lambda a: self.open(ENGINES + a.engine, 3, "copy", f"copy v{a.version} by {a.path}"),
            act.RequantizeWeights: lambda a: self.open(
                ENGINES + a.engine, 3, "requantise", f"requantise, agree ({a.quantization})"
            ),
            act.SwitchPool: self.switch_pool,
            act.Note: self.note,
            act.Finish: lambda a: self.instant(CONTROL, 1, f"finish: {a.reason}"),
        }

    # --- writing ------------------------------------------------------------------------------------------------------

    def write(self, records: Iterable[tuple[ev.Event, Sequence[act.Action]]]) -> int:
        self.name_tracks()
        for event, actions in records:
            self.t = event.t
            handler = self.on_event.get(type(event))
            if handler is not None:
                handler(event)
            for action in actions:
                handle = self.on_action.get(type(action))
                if handle is not None:
                    handle(action)
        self.close_everything()
        # names first, then by time; of slices that begin together the longer one first, so that viewers nest them
        self.events.sort(key=lambda e: (e.get("ts", -1.0), -e.get("dur", 0.0)))
        self.out.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        self.out.write(",\n".join(json.dumps(e, separators=(",", ":"), ensure_ascii=False) for e in self.events))
        self.out.write("\n]}\n")
        return len(self.events)

    def emit(self, **event: Any) -> None:
        self.events.append(event)

    def us(self, t: float) -> float:
        return round(t * 1e6, 3)

    def name_process(self, pid: int, name: str, order: int) -> None:
        self.emit(ph="M", name="process_name", pid=pid, args={"name": name})
        self.emit(ph="M", name="process_sort_index", pid=pid, args={"sort_index": order})

    def name_thread(self, pid: int, tid: int, name: str) -> None:
        self.emit(ph="M", name="thread_name", pid=pid, tid=tid, args={"name": name})

    def name_tracks(self) -> None:
        pools = self.layout.pools
        self.name_process(TRAINER, f"trainer ({self.layout.train_gpus} GPUs)", 0)
        for tid, name in ((TRAIN, "train"), (SIGNALS, "signals"), (WAITS, "waits")):
            self.name_thread(TRAINER, tid, name)
        self.name_process(PUBLICATIONS, "weight updates", 1)
        self.name_process(POOLS, "pools", 2)
        for p in pools:
            self.name_thread(POOLS, p.index + 1, f"pool {p.name} ({p.gpus} GPUs)")
            if p.shared:
                self.open(POOLS, p.index + 1, "phase", p.phase)
        self.name_process(CONTROL, "core", 3)
        self.name_thread(CONTROL, 1, "admission")
        for e in self.layout.engines:
            self.name_process(
                ENGINES + e.index, f"engine {e.index} ({e.gpus} GPUs, pool {pools[e.pool].name})", 10 + e.index
            )
            self.name_thread(ENGINES + e.index, 2, "paused")
            self.name_thread(ENGINES + e.index, 3, "new weights")

    def open(self, pid: int, tid: int, slot: str, name: str, **args: Any) -> None:
        """Begin a slice; one that is open in this slot ends here."""
        self.close(pid, tid, slot)
        self.spans[(pid, tid, slot)] = (self.t, name, args)

    def close(self, pid: int, tid: int, slot: str, **args: Any) -> None:
        """End a slice, if one is open."""
        span = self.spans.pop((pid, tid, slot), None)
        if span is not None:
            start, name, known = span
            self.emit(
                ph="X",
                pid=pid,
                tid=tid,
                name=name,
                ts=self.us(start),
                dur=self.us(self.t - start),
                args={**known, **args},
            )

    def instant(self, pid: int, tid: int, name: str, **args: Any) -> None:
        self.emit(ph="i", s="t", pid=pid, tid=tid, name=name, ts=self.us(self.t), args=args)

    def counter(self, pid: int, name: str, **values: float) -> None:
        self.emit(ph="C", pid=pid, name=name, ts=self.us(self.t), args=values)

    def close_everything(self) -> None:
        for begin in list(self.turns.values()):
            self.end_turn(begin, open=True)
        for pid, tid, slot in list(self.spans):
            self.close(pid, tid, slot, open=True)

    # --- turns --------------------------------------------------------------------------------------------------------

    def start_turn(self, a: act.StartTurn) -> None:
        lost = self.turns.pop((a.trajectory, a.turn), None)
        if lost is not None:
            self.end_turn(lost, failed="sent again")
            self.flight(lost["pid"] - ENGINES, -1)
        pid = ENGINES + a.engine
        begin = {
            "pid": pid,
            "tid": 1,
            "cat": "turn",
            "id": f"{a.trajectory}-{a.turn}.{a.attempt}",
            "name": f"{a.trajectory}-{a.turn}",
        }
        self.emit(
            ph="b",
            ts=self.us(self.t),
            args={"group": a.group, "task": a.task, "member": a.member, "attempt": a.attempt, "why": a.why},
            **begin,
        )
        self.turns[(a.trajectory, a.turn)] = begin
        self.flight(a.engine, 1)

    def end_turn(self, begin: dict[str, Any], **args: Any) -> None:
        self.emit(ph="e", ts=self.us(self.t), args=args, **begin)

    def flight(self, engine: int, change: int) -> None:
        self.in_flight[engine] = self.in_flight.get(engine, 0) + change
        self.counter(ENGINES + engine, "in flight", turns=self.in_flight[engine])

    def turn_finished(self, e: ev.TurnFinished) -> None:
        begin = self.turns.pop((e.trajectory, e.turn), None)
        if begin is None:
            return
        if self.t > e.first_token_t >= 0:
            self.emit(ph="n", ts=self.us(e.first_token_t), args={}, **{**begin, "name": "first token"})
        self.end_turn(
            begin,
            prompt_tokens=e.prompt_tokens,
            output_tokens=e.output_tokens,
            cached_tokens=e.cached_tokens,
            versions=[span[0] for span in e.spans],
            finish_reason=e.finish_reason,
            retractions=e.retractions,
        )
        self.flight(e.engine, -1)

    def prefill_finished(self, e: ev.PrefillFinished) -> None:
        """Its slice ends on the prefill engine; `hand_over` opens the next one on the decode engine."""
        begin = self.turns.pop((e.trajectory, e.turn), None)
        if begin is not None:
            self.end_turn(begin, prefilled=True)
            self.flight(e.engine, -1)

    def hand_over(self, a: act.HandOver) -> None:
        name = f"{a.trajectory}-{a.turn}"
        begin = {"pid": ENGINES + a.to, "tid": 1, "cat": "turn", "id": f"{name}.decode", "name": name}
        self.emit(ph="b", ts=self.us(self.t), args={"from": a.engine, "why": a.why}, **begin)
        self.turns[(a.trajectory, a.turn)] = begin
        self.flight(a.to, 1)

    def turn_failed(self, e: ev.TurnFailed) -> None:
        begin = self.turns.pop((e.trajectory, e.turn), None)
        if begin is not None:
            self.end_turn(begin, failed=e.reason, output_tokens=e.output_tokens)
            self.flight(e.engine, -1)

    def run_tool(self, _: act.RunTool) -> None:
        self.tools += 1
        self.counter(CONTROL, "tools running", tools=self.tools)

    def tool_finished(self, _: ev.ToolFinished) -> None:
        self.tools -= 1
        self.counter(CONTROL, "tools running", tools=self.tools)

    def load_reported(self, e: ev.LoadReported) -> None:
        self.counter(ENGINES + e.engine, "KV tokens", used=e.kv_used_tokens)

    # --- trainer ------------------------------------------------------------------------------------------------------

    def train(self, a: act.Train) -> None:
        self.updates[a.batch] = a.updates
        self.open(
            TRAINER,
            TRAIN,
            "train",
            f"train batch {a.batch}",
            trajectories=len(a.experiences),
            tokens=sum(x.output_tokens - x.masked_tokens for x in a.experiences),
            max_staleness=max((x.staleness for x in a.experiences), default=0),
            why=a.why,
        )

    def train_step_finished(self, e: ev.TrainStepFinished) -> None:
        if e.update + 1 >= self.updates.get(e.batch, 1):
            self.updates.pop(e.batch, None)
            self.close(TRAINER, TRAIN, "train")
        else:
            self.instant(TRAINER, TRAIN, f"update {e.update}")

    def on_trainer(self, pool: int) -> bool:
        return pool == self.layout.train_pool

    def compute_signals(self, a: act.ComputeSignals) -> None:
        if self.on_trainer(a.pool):
            self.open(TRAINER, SIGNALS, a.signal, a.signal, trajectories=len(a.trajectories))

    def signal_ready(self, e: ev.SignalReady) -> None:
        self.close(TRAINER, SIGNALS, e.signal)

    # --- weights and pools --------------------------------------------------------------------------------------------

    def prepare_weights(self, a: act.PrepareWeights) -> None:
        self.name_thread(PUBLICATIONS, a.version, f"version {a.version}")
        self.open(
            PUBLICATIONS, a.version, "update", f"v{a.version} by {a.path}", trainer_version=a.trainer_version,
            participants=len(a.participants), why=a.why,
        )  # fmt: skip
        self.open(PUBLICATIONS, a.version, "prepare", "prepare")
        for engine in a.participants:
            self.publishing[engine] = a.version

    def pause_engine(self, a: act.PauseEngine) -> None:
        self.open(ENGINES + a.engine, 2, "drain", f"drain ({a.mode})")

    def engine_paused(self, e: ev.EnginePaused) -> None:
        self.close(ENGINES + e.engine, 2, "drain")
        self.open(ENGINES + e.engine, 2, "pause", "paused")

    def engine_ready(self, e: ev.EngineReady) -> None:
        self.close(ENGINES + e.engine, 3, "requantise")
        self.open(ENGINES + e.engine, 3, "barrier", "waits for the barrier")

    def engine_resumed(self, e: ev.EngineResumed) -> None:
        self.close(ENGINES + e.engine, 3, "barrier")
        self.close(ENGINES + e.engine, 2, "pause", version=e.version)
        version = self.publishing.pop(e.engine, e.version)
        if version not in self.publishing.values():
            self.close(PUBLICATIONS, version, "update")

    def update_failed(self, e: ev.WeightUpdateFailed) -> None:
        self.instant(PUBLICATIONS, e.version, f"failed at {e.stage}", engine=e.engine, reason=e.reason)
        if e.stage == "prepare":
            self.close(PUBLICATIONS, e.version, "prepare", failed=True)
            self.close(PUBLICATIONS, e.version, "update", failed=True)
            self.publishing = {k: v for k, v in self.publishing.items() if v != e.version}
        else:
            for slot in ("copy", "requantise"):
                self.close(ENGINES + e.engine, 3, slot, failed=True)

    def switch_pool(self, a: act.SwitchPool) -> None:
        self.close(POOLS, a.pool + 1, "phase")
        self.open(POOLS, a.pool + 1, "switch", f"switch to {a.phase}", why=a.why)

    def pool_switched(self, e: ev.PoolSwitched) -> None:
        self.close(POOLS, e.pool + 1, "switch")
        self.open(POOLS, e.pool + 1, "phase", e.phase)

    def note(self, a: act.Note) -> None:
        pid, tid = (TRAINER, WAITS) if a.subject == "trainer" else (CONTROL, 1)
        if a.subject == "trainer" and a.state == "busy":
            self.close(pid, tid, "note")
        else:
            self.open(pid, tid, "note", a.state)
