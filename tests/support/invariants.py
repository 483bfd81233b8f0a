"""The invariants of the contract between core and backend, checked from the run itself: events, and the actions that
followed.

Feed every (event, actions) pair in order to `Watch`, then call `done`. It knows the scenario and nothing of any
backend, so one checker serves all of them. A broken invariant raises AssertionError that names it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from testbed.core import actions as do
from testbed.core import events as said
from testbed.core.core import Core
from testbed.metrics.staleness import MEASURES, at_dequeue, sizes_of
from testbed.scenario import Scenario
from testbed.scenario.layout import layout_of

Record = tuple[said.Event, list[do.Action]]


class Watch:
    """Mirrors what a run says about itself; `scenario` gives group sizes, pools and rules."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.layout = layout_of(scenario)
        n = len(self.layout.engines)
        self.t = 0.0
        self.populated = 0
        self.retired: dict[int, do.Retire] = {}
        self.live: dict[int, do.StartTurn] = {}
        self.computed: dict[int, do.StartTurn] = {}
        """Prompts that are computed and wait for a decode engine."""
        self.sent: dict[tuple[int, int], int] = {}
        self.environments: Counter[int] = Counter()
        self.version = [0] * n
        self.lost = [False] * n
        self.closed = [False] * n
        self.copied: dict[int, int] = {}
        self.agreed: dict[int, int] = {}
        self.wave: dict[int, tuple[int, ...]] = {}
        self.phase = {p.index: p.phase for p in self.layout.pools}
        self.training: do.Train | None = None
        self.updates_left = 0
        self.signals: set[int] = set()
        self.batches = 0
        self.trainer_version = 0
        self.used: Counter[int] = Counter()
        self.trains: list[tuple[float, do.Train]] = []
        self.staleness: list[int] = []
        self.finished = ""

    def __call__(self, event: said.Event, actions: Iterable[do.Action]) -> None:
        assert not self.finished, "nothing happens after Finish"
        assert event.t >= self.t, "times never fall"
        self.t = event.t
        hear = getattr(self, "_heard_" + type(event).__name__, None)
        if hear:
            hear(event)
        for action in actions:
            follow = getattr(self, "_did_" + type(action).__name__, None)
            if follow:
                follow(action)

    def done(self) -> None:
        """Invariant 1, and the conservation that follows from it."""
        assert self.finished, "the run has an end"
        assert sorted(self.retired) == list(range(self.populated)), "every trajectory is retired exactly once"
        assert all(count == 0 for count in self.environments.values()), "every environment is released"
        outcomes = Counter(r.outcome for r in self.retired.values())
        assert sum(outcomes.values()) == self.populated

    # --- trajectories -------------------------------------------------------------------------------------------------

    def _heard_TaskArrived(self, e: said.TaskArrived) -> None:
        if e.group >= 0:
            self.populated += e.members or self.scenario.members_started

    def _did_StartTurn(self, a: do.StartTurn) -> None:
        assert a.trajectory not in self.live, "at most one live generation per request id"
        assert self.layout.engines[a.engine].role != "decode", "turns start where prompts are computed"
        self.computed.pop(a.trajectory, None)
        assert a.trajectory not in self.retired, "what is retired does not generate"
        assert not self.lost[a.engine] and not self.closed[a.engine], f"engine {a.engine} takes no turn now"
        pool = self.layout.engines[a.engine].pool
        assert self.phase[pool] == "generate", "a shared pool never generates and trains at once"
        before = self.sent.get((a.trajectory, a.turn), -1)
        assert a.attempt == before + 1, "sent again under the same request id, counted"
        self.sent[a.trajectory, a.turn] = a.attempt
        self.live[a.trajectory] = a

    def _heard_TurnFinished(self, e: said.TurnFinished) -> None:
        turn = self.live.get(e.trajectory)
        if turn is None or turn.engine != e.engine:
            assert self.lost[e.engine], "only an engine that was given up reports a turn that nobody waits for"
            return
        del self.live[e.trajectory]
        assert (turn.turn, turn.engine) == (e.turn, e.engine)
        edges = [0, *(end for _, _, end in e.spans)]
        assert [start for _, start, _ in e.spans] == edges[:-1] and edges[-1] == e.output_tokens, "spans partition"
        versions = [v for v, _, _ in e.spans]
        assert versions == sorted(versions), "versions rise within a turn"
        assert e.started_t <= e.first_token_t <= e.t

    def _heard_PrefillFinished(self, e: said.PrefillFinished) -> None:
        turn = self.live.get(e.trajectory)
        if turn is None or turn.engine != e.engine:
            assert self.lost[e.engine], "only an engine that was given up computes a prompt that nobody waits for"
            return
        assert turn.turn == e.turn and self.layout.engines[e.engine].role == "prefill"
        self.computed[e.trajectory] = self.live.pop(e.trajectory)

    def _did_HandOver(self, a: do.HandOver) -> None:
        turn = self.computed.pop(a.trajectory)
        assert (turn.turn, turn.engine) == (a.turn, a.engine), "what was computed there goes on"
        assert self.layout.engines[a.to].role == "decode"
        assert not self.lost[a.to] and not self.closed[a.to], f"engine {a.to} takes no turn now"
        self.live[a.trajectory] = msgspec.structs.replace(turn, engine=a.to)

    def _heard_TurnFailed(self, e: said.TurnFailed) -> None:
        turn = self.live.get(e.trajectory)
        if turn is not None and turn.engine == e.engine:
            del self.live[e.trajectory]

    def _did_AbortTurn(self, a: do.AbortTurn) -> None:
        if a.why != "engine_removed":
            assert a.trajectory in self.live and self.live[a.trajectory].engine == a.engine

    def _did_Note(self, a: do.Note) -> None:
        subject, _, engine = a.subject.partition(":")
        if subject == "engine" and a.state == "removed":
            self._gone(int(engine))

    def _gone(self, engine: int) -> None:
        self.lost[engine] = True
        self.wave = {k: tuple(e for e in wave if e != engine) for k, wave in self.wave.items()}
        self.live = {k: t for k, t in self.live.items() if t.engine != engine}

    def _did_PrepareEnvironment(self, a: do.PrepareEnvironment) -> None:
        assert a.trajectory not in self.environments
        self.environments[a.trajectory] = 1

    def _did_ReleaseEnvironment(self, a: do.ReleaseEnvironment) -> None:
        assert self.environments[a.trajectory] == 1, "released once, and only if prepared"
        self.environments[a.trajectory] = 0

    def _did_Retire(self, a: do.Retire) -> None:
        assert a.outcome in ("trained", "dropped", "aborted", "failed")
        assert a.reason or a.outcome == "trained", "an end that is no training has a reason"
        for t in a.trajectories:
            assert t not in self.retired, f"trajectory {t} ends once"
            ended = a.reason == "run_ended"
            assert t not in self.live or ended, "no generation of a retired trajectory goes on"
            self.retired[t] = a
            if a.outcome == "trained":
                assert self.used[t] == self.scenario.experience.selection.use_count
            elif a.outcome in ("aborted", "failed") and not ended:
                assert self.used[t] == 0

    # --- training -----------------------------------------------------------------------------------------------------

    def _did_ComputeSignals(self, a: do.ComputeSignals) -> None:
        assert a.signal in self.scenario.algorithm.signals, "only roles that the algorithm asks for do any work"
        assert not self.retired.keys() & set(a.trajectories)
        if a.pool >= 0:
            assert self.training is None and not self.signals, "one job at a time on the training pool"
            assert self.phase[a.pool] == "train"
            self.signals = set(a.trajectories)

    def _heard_SignalReady(self, e: said.SignalReady) -> None:
        self.signals -= set(e.trajectories)

    def _did_Train(self, a: do.Train) -> None:
        assert self.training is None and not self.signals, "one job at a time on the training pool"
        assert self.phase[a.pool] == "train", "a shared pool never generates and trains at once"
        assert a.batch == self.batches and a.why
        assert len({x.trajectory for x in a.experiences}) == len(a.experiences), "no trajectory twice in a batch"
        self.training, self.updates_left = a, a.updates
        self.trains.append((self.t, a))
        for x in a.experiences:
            self._experience(x)

    def _experience(self, x: do.Experience) -> None:
        assert x.trajectory not in self.retired
        assert x.use == self.used[x.trajectory] < self.scenario.experience.selection.use_count
        self.used[x.trajectory] += 1
        times = (
            x.submitted_t,
            x.dispatched_t,
            x.first_token_t,
            x.generated_t,
            x.ready_t,
            x.group_ready_t,
            x.dequeued_t,
        )
        assert list(times) == sorted(times) and x.dequeued_t == self.t, f"times in order: {times}"
        assert 0 <= x.oldest_version <= x.newest_version <= max(self.version)
        assert x.completion_deployed <= x.dequeue_deployed
        sizes = sizes_of(self.scenario)
        for measure in MEASURES:
            assert at_dequeue(x, measure, sizes) >= 0, f"staleness ({measure}) is never negative: {x}"
        assert x.completion_deployed >= x.oldest_version
        assert x.trainer_version == self.trainer_version
        rule = self.scenario.experience.staleness
        if rule.bound is not None and rule.action in ("drop", "retry") and rule.event != "completion":
            assert x.staleness <= rule.bound, "the dequeue reading decides"
        self.staleness.append(x.dequeue_deployed - x.oldest_version)

    def _heard_TrainStepFinished(self, e: said.TrainStepFinished) -> None:
        assert self.training is not None and e.batch == self.training.batch
        self.trainer_version += 1
        self.updates_left -= 1
        if not self.updates_left:
            self.training = None
            self.batches += 1

    # --- weights ------------------------------------------------------------------------------------------------------

    def _did_PrepareWeights(self, a: do.PrepareWeights) -> None:
        assert not any(c and not out for c, out in zip(self.closed, self.lost, strict=True)), "one update at a time"
        assert a.trainer_version == self.trainer_version and a.why
        assert a.version > max(self.version), "versions only rise"

    def _did_PauseEngine(self, a: do.PauseEngine) -> None:
        assert not self.closed[a.engine] and not self.lost[a.engine]
        rule = self.scenario.weights.transition.pause_generation_mode
        assert a.mode == ("retract" if rule == "finish" else rule), "the rule is frozen"
        if rule == "finish":
            assert all(t.engine != a.engine for t in self.live.values()), "requests in flight end first"
        self.closed[a.engine] = True
        self.copied.pop(a.engine, None)
        self.agreed.pop(a.engine, None)

    def _did_FlushCache(self, a: do.FlushCache) -> None:
        assert self.closed[a.engine] and self.scenario.weights.transition.kv == "flush"

    def _did_CopyWeights(self, a: do.CopyWeights) -> None:
        assert self.closed[a.engine] and a.engine in a.participants
        self.copied.pop(a.engine, None)
        self.agreed.pop(a.engine, None)
        self.wave[a.engine] = a.participants

    def _heard_WeightsCopied(self, e: said.WeightsCopied) -> None:
        self.copied[e.engine] = e.version

    def _did_RequantizeWeights(self, a: do.RequantizeWeights) -> None:
        assert self.copied[a.engine] == a.version, "requantised after the copy"

    def _heard_EngineReady(self, e: said.EngineReady) -> None:
        self.agreed[e.engine] = e.version

    def _did_ResumeEngine(self, a: do.ResumeEngine) -> None:
        assert self.closed[a.engine] and a.kv == self.scenario.weights.transition.kv
        if a.version == self.version[a.engine]:
            return
        for e in self.wave[a.engine]:
            if self.lost[e] or self.version[e] == a.version:
                continue
            assert self.copied.get(e) == a.version, f"engine {a.engine} resumes before engine {e} has copied"
            if self.scenario.weights.requantize != "none":
                assert self.agreed.get(e) == a.version, f"engine {a.engine} resumes before engine {e} is ready"

    def _heard_EngineResumed(self, e: said.EngineResumed) -> None:
        assert e.version >= self.version[e.engine], "versions only rise"
        self.version[e.engine] = e.version
        self.closed[e.engine] = False

    def _heard_EngineLost(self, e: said.EngineLost) -> None:
        self._gone(e.engine)

    def _heard_EngineJoined(self, e: said.EngineJoined) -> None:
        self.lost[e.engine] = self.closed[e.engine] = False
        self.version[e.engine] = e.version

    # --- pools and the end --------------------------------------------------------------------------------------------

    def _did_SwitchPool(self, a: do.SwitchPool) -> None:
        assert self.layout.pools[a.pool].shared and self.training is None and not self.signals
        mine = self.layout.pools[a.pool].engines
        assert all(t.engine not in mine for t in self.live.values()), "in-flight turns end before the phase does"
        self.phase[a.pool] = "switching"

    def _heard_PoolSwitched(self, e: said.PoolSwitched) -> None:
        self.phase[e.pool] = e.phase

    def _did_Finish(self, a: do.Finish) -> None:
        self.finished = a.reason


def watched(scenario: Scenario, records: Iterable[Record]) -> Watch:
    """Check a finished run; returns the watch for further questions."""
    watch = Watch(scenario)
    for event, actions in records:
        watch(event, actions)
    watch.done()
    return watch


def replayed(scenario: Scenario, records: Iterable[Record]) -> int:
    """A fresh core that is fed the same events takes the same actions: that is the proof that there is one core.
    Returns how many."""
    core = Core(scenario)
    compared = 0
    for event, actions in records:
        assert core.handle(event) == actions, f"replay differs at {event}"
        compared += len(actions)
    return compared
