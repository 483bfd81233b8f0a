"""A weight update, step by step: prepare, pause, copy, requantise, ready, barrier, resume; in waves; with failures.

One update at a time. A failure leaves the old version serving; a wave that has passed its barrier stays. It asks the
publication policy which path and which waves, and the experience store whether a publication must wait. It refuses to
know how bytes move."""

from __future__ import annotations

from collections.abc import Callable

from testbed.core import actions as do
from testbed.core import events as said
from testbed.core.context import Context
from testbed.core.errors import IllegalTransition, ProtocolError
from testbed.core.experience import ExperienceStore
from testbed.core.records import Engine
from testbed.core.rollouts import Rollouts
from testbed.core.states import ENGINE
from testbed.policies.publication import RENDEZVOUS, choose_path, waves

MAX_RETRIES = 3
"""Copies sent again to one engine under `on_failure: retry` before the update is given up; catch-ups tried again before
the engine is."""


def _not_draining(engine: Engine) -> bool:
    return engine.state != "draining"


def _empty_or_further(engine: Engine) -> bool:
    return engine.state != "draining" or not engine.in_flight


def _paused(engine: Engine) -> bool:
    return engine.state == "paused"


def _ready(engine: Engine) -> bool:
    return engine.state == "ready"


def _settled(engine: Engine) -> bool:
    """Not on its way any more."""
    return engine.state in ("serving", "lost", "away")


class Update:
    """One publication (or the catch-up of engines that were away)."""

    def __init__(self, version: int, path: str, participants: tuple[int, ...], catch_up: bool) -> None:
        self.version = version
        self.path = path
        self.participants = participants
        self.catch_up = catch_up
        self.requests = 0
        """Publications that were due when it started: several, if the one before took longer than training."""
        self.prepared = catch_up
        self.trainer_released = catch_up
        self.waves: list[tuple[int, ...]] = []
        self.wave: tuple[int, ...] = ()
        self.members: frozenset[int] = frozenset()
        """The wave, as a set."""
        self.witness = 0
        """Place in the wave of the engine that was not there yet when all of them were last looked at."""
        self.passed: set[int] = set()
        """Engines of this wave whose barrier is passed and that are being resumed."""
        self.retries: dict[int, int] = {}
        self.failed = False
        self.timer = -1
        self.overdue: set[int] = set()
        """Engines that were being resumed when the timer fired."""
        self.waits_for_pool = False

    def set_wave(self, wave: tuple[int, ...]) -> None:
        self.wave = wave
        self.members = frozenset(wave)
        self.witness = 0


class Publications:
    """Owns the engines' update states and the deployed version."""

    def __init__(self, ctx: Context, experience: ExperienceStore, rollouts: Rollouts) -> None:
        self._ctx = ctx
        self._p = ctx.progress
        self._experience = experience
        self._rollouts = rollouts
        self._weights = ctx.scenario.weights
        self._rule = ctx.scenario.weights.transition
        self._needs_requantize = self._weights.requantize != "none"
        self.update: Update | None = None
        self._due = 0
        """Publications that were asked for and have not started."""
        self._path_costs: tuple[said.PathCost, ...] = ()
        self._catch_up: list[int] = []
        """Engines that missed publications; served again once they have copied the deployed version."""
        self._missed: dict[int, int] = {}
        """Engine -> catch-ups in a row that failed."""
        self._given_up = -1
        """Version of the last update that failed; its preparation may still be reported."""
        self._cut_short: set[int] = set()
        """Engines that were lost, restored or asked again within a step: an answer to it may still be on its way."""

    def run_started(self, event: said.RunStarted) -> None:
        self._path_costs = event.path_costs

    # --- life of an update --------------------------------------------------------------------------------------------

    @property
    def holds_trainer(self) -> bool:
        return self.update is not None and not self.update.trainer_released

    @property
    def waits_for_pool(self) -> bool:
        """Prepared, and its participants' GPUs have to change phase first."""
        u = self.update
        return u is not None and u.waits_for_pool and u.prepared

    @property
    def busy(self) -> bool:
        return self.update is not None or self._due > 0

    def request(self) -> None:
        """A publication is due."""
        self._due += 1
        self.pump()

    def pump(self) -> None:
        """Start the next update if one is due and nothing holds it."""
        if self.update is None and self._catch_up:
            self._start_catch_up()
        if self.update is None and self._due and not self._experience.holds_publication():
            self._start(self._due)
            self._due = 0

    def _advance(self, engine: Engine, given: str) -> None:
        try:
            engine.state = ENGINE[engine.state][given]
        except KeyError:
            raise IllegalTransition("engine", engine.index, engine.state, given, ENGINE) from None

    def _start(self, requests: int) -> None:
        ctx = self._ctx
        at_work = tuple(e.index for e in ctx.engines if e.state == "serving" and not e.leaving)
        participants = at_work or tuple(e.index for e in ctx.engines if e.state == "away")
        path, why = choose_path(self._weights, self._path_costs)
        version = max((e.version for e in ctx.engines), default=0) + 1
        update = Update(version, path, participants, catch_up=False)
        update.requests = requests
        update.waits_for_pool = not at_work and bool(participants)
        self.update = update
        self._p.updating = True
        ctx.out.append(
            do.PrepareWeights(version, self._p.trainer_version, path, participants, ctx.layout.train_pool, why)
        )

    def prepared(self, event: said.WeightsPrepared) -> None:
        if self.update is None and event.version == self._given_up:
            return
        update = self._of(event.version)
        update.prepared = True
        if not update.waits_for_pool:
            self._begin(update)

    def trainer_released(self, event: said.TrainerReleased) -> None:
        if self.update is not None and self.update.version == event.version:
            self.update.trainer_released = True

    def _of(self, version: int) -> Update:
        if self.update is None or self.update.version != version:
            raise ProtocolError(f"version {version} is not being published")
        return self.update

    def _begin(self, update: Update) -> None:
        update.waits_for_pool = False
        alive = self._takes_part(update.participants)
        update.participants = alive
        update.waves = waves(self._weights, alive)
        if not update.catch_up:
            self._rollouts.cancel_stale(update.version)
        if not update.catch_up:
            for index in alive:
                if self._ctx.engines[index].version >= self._p.deployed:
                    self._rollouts.open(index)  # until its wave comes
        self._next_wave(update)

    def _takes_part(self, indexes: tuple[int, ...]) -> tuple[int, ...]:
        """Those that have not been lost or left for training since."""
        engines = self._ctx.engines
        return tuple(i for i in indexes if engines[i].state == "serving" and not engines[i].leaving)

    def _next_wave(self, update: Update) -> None:
        update.set_wave(())
        while update.waves and not update.wave:
            update.set_wave(self._takes_part(update.waves.pop(0)))
        if not update.wave:
            self._conclude(update)
            return
        update.passed = set()
        update.timer = -1
        ctx = self._ctx
        for index in update.wave:
            engine = ctx.engines[index]
            self._rollouts.close(index)
            self._advance(engine, "begin")
            if self._rule.pause_generation_mode != "finish":
                self._pause(engine, update)
        if self._rule.pause_generation_mode == "finish":
            self._drained(update)

    def _arm(self, update: Update) -> None:
        """The time for a wave counts from its last drained engine: requests that take long to finish are nobody's
        failure."""
        update.timer = self._ctx.next_timer()
        self._ctx.out.append(do.SetTimer(update.timer, self._ctx.now + self._weights.timeout_s))

    def _pause(self, engine: Engine, update: Update) -> None:
        self._advance(engine, "pause")
        mode = self._rule.pause_generation_mode
        self._ctx.out.append(do.PauseEngine(engine.index, "retract" if mode == "finish" else mode, update.version))
        self._arm_when_drained(update)

    def _arm_when_drained(self, update: Update) -> None:
        if update.timer < 0 and self._every(update, _not_draining):
            self._arm(update)

    def _every(self, update: Update, there: Callable[[Engine], bool]) -> bool:
        """Whether all engines of the wave are there. Looks first at the one that was not when last asked, so that
        asking after each engine's step costs O(1) on the way."""
        engines, wave = self._ctx.engines, update.wave
        for k in range(len(wave)):
            at = (update.witness + k) % len(wave)
            if not there(engines[wave[at]]):
                update.witness = at
                return False
        return True

    def turn_left(self, engine: Engine) -> None:
        """A turn left this engine: under `finish`, the last one lets the pause begin."""
        if engine.state == "draining" and not engine.in_flight and self.update is not None:
            if self.update.path in RENDEZVOUS:
                self._drained(self.update)
            else:
                self._pause(engine, self.update)

    def _drained(self, update: Update) -> None:
        """Under `finish`: pause the engines that have run empty; for a collective copy all of them, or none yet."""
        if update.path in RENDEZVOUS and not self._every(update, _empty_or_further):
            return
        for index in update.wave:
            engine = self._ctx.engines[index]
            if engine.state == "draining" and not engine.in_flight:
                self._pause(engine, update)

    def paused(self, event: said.EnginePaused) -> None:
        found = self._member(event.engine, "pausing")
        if found is None:
            return
        engine, update = found
        self._advance(engine, "paused")
        if self._rule.kv == "flush":
            self._ctx.out.append(do.FlushCache(engine.index))
        if self._rule.kv != "keep":
            self._rollouts.router.cache_dropped(engine.index)
        if update.failed:
            self._restore(engine)
        elif update.path not in RENDEZVOUS:
            self._copy(engine, update)
        else:
            self._rendezvous(update)

    def _rendezvous(self, update: Update) -> None:
        """A collective copy starts when every engine of the wave is there."""
        if self._every(update, _paused):
            for index in update.wave:
                self._copy(self._ctx.engines[index], update)

    def _member(self, index: int, awaited: str, version: int | None = None) -> tuple[Engine, Update] | None:
        """The engine whose step was awaited, and its update; None if the answer comes too late to matter.

        Raises `ProtocolError` if nobody asked that engine (or for that version).
        """
        engine, update = self._ctx.engines[index], self.update
        part = update is not None and index in update.members and version in (None, update.version)
        if index in self._cut_short and not (part and engine.state == awaited):
            return None
        if not part or update is None:
            raise ProtocolError(f"engine {index} takes no part in an update" + (f" to {version}" if version else ""))
        return engine, update

    def _copy(self, engine: Engine, update: Update) -> None:
        self._advance(engine, "copy")
        self._ctx.out.append(do.CopyWeights(engine.index, update.version, update.path, update.wave))

    def copied(self, event: said.WeightsCopied) -> None:
        found = self._member(event.engine, "copying", event.version)
        if found is None:
            return
        engine, update = found
        self._advance(engine, "copied")
        if self._needs_requantize:
            self._advance(engine, "requantize")
            self._ctx.out.append(do.RequantizeWeights(engine.index, update.version, self._weights.requantize))
        else:
            self._advance(engine, "agree")
            self._barrier(update)

    def ready(self, event: said.EngineReady) -> None:
        found = self._member(event.engine, "requantizing", event.version)
        if found is None:
            return
        engine, update = found
        self._advance(engine, "agree")
        self._barrier(update)

    def _barrier(self, update: Update) -> None:
        """Invariant 3: nobody resumes before every participant of the wave is ready."""
        if not self._every(update, _ready):
            return
        engines = [self._ctx.engines[i] for i in update.wave]
        if not update.waves and not update.catch_up:
            self._p.deployed = update.version  # the last participants are past the point of no return
        for engine in engines:
            self._advance(engine, "barrier")
            update.passed.add(engine.index)
            self._ctx.out.append(do.ResumeEngine(engine.index, update.version, self._rule.kv))

    def resumed(self, event: said.EngineResumed) -> None:
        found = self._member(event.engine, "resuming")
        if found is None:
            return
        engine, update = found
        self._advance(engine, "resumed")
        if event.version < engine.version:
            raise ProtocolError(f"engine {engine.index} went back from version {engine.version} to {event.version}")
        if event.version > engine.version and engine.index not in update.passed:
            raise ProtocolError(f"engine {engine.index} serves version {event.version} before the barrier was passed")
        engine.version = event.version
        self._wave_over(update)

    def _wave_over(self, update: Update) -> None:
        if not self._every(update, _settled):
            return
        if not (update.catch_up and update.failed):
            for index in update.wave:  # together: the first to resume must not be given every turn that waits
                if self._ctx.engines[index].state == "serving":
                    self._rollouts.open(index)
        if update.failed:
            self._conclude(update)
        else:
            self._next_wave(update)

    def _conclude(self, update: Update) -> None:
        p = self._p
        self.update = None
        p.updating = False
        if update.failed:
            self._given_up = update.version
        if update.catch_up:
            self._caught_up(update)
        else:
            p.publications += update.requests
            if not update.failed:
                p.deployed = update.version
                self._catch_up.extend(
                    e.index for e in self._ctx.engines if e.state == "serving" and e.version < p.deployed
                )
        self.pump()

    def _caught_up(self, update: Update) -> None:
        """Engines that failed to catch up try again, and do not serve meanwhile: what they have was replaced."""
        for index in self._takes_part(update.participants):
            if self._ctx.engines[index].version >= update.version:
                self._missed.pop(index, None)
                continue
            self._missed[index] = self._missed.get(index, 0) + 1
            if self._missed[index] > MAX_RETRIES:
                del self._missed[index]
                self._remove(self._ctx.engines[index])
            else:
                self._rollouts.close(index)
                self._catch_up.append(index)

    # --- failures -----------------------------------------------------------------------------------------------------

    def failed(self, event: said.WeightUpdateFailed) -> None:
        if event.engine < 0:
            update = self._of(event.version)
            if update.wave:
                self._give_up(update)
            else:
                update.failed = True
                self._conclude(update)
            return
        engine = self._ctx.engines[event.engine]
        found = self._member(event.engine, engine.state, event.version)
        if found is None or engine.state in ("serving", "resuming"):
            return
        update = found[1]
        self._trouble(engine, update)
        if self.update is update and engine.state == "pausing" and event.stage == "pause":
            self._restore(engine)

    def _trouble(self, engine: Engine, update: Update) -> None:
        policy = self._weights.on_failure
        tried = update.retries.get(engine.index, 0)
        can_copy = engine.state in ("copying", "requantizing")
        if policy == "retry" and can_copy and tried < MAX_RETRIES and not update.failed:
            update.retries[engine.index] = tried + 1
            self._cut_short.add(engine.index)
            self._copy(engine, update)
        elif policy == "remove_engine":
            self._remove(engine)
        else:
            self._give_up(update)

    def _remove(self, engine: Engine) -> None:
        """The core gives an engine up that nobody reported lost: what still runs there is taken back first."""
        self._ctx.out.append(do.Note(f"engine:{engine.index}", "removed"))
        self._rollouts.take_back(engine, "engine_removed")
        self.engine_lost(engine)

    def _give_up(self, update: Update) -> None:
        """Every participant of the wave that has not passed the barrier goes back to the version it served."""
        update.failed = True
        update.trainer_released = True
        update.waves = []
        for index in update.wave:
            engine = self._ctx.engines[index]
            if engine.state == "draining":
                self._advance(engine, "cancel")
                self._rollouts.open(index)
            elif engine.state in ("paused", "copying", "copied", "requantizing", "ready"):
                self._restore(engine)
        self._arm(update)
        self._wave_over(update)

    def _restore(self, engine: Engine) -> None:
        self._cut_short.add(engine.index)
        self._advance(engine, "restore")
        self._ctx.out.append(do.ResumeEngine(engine.index, engine.version, self._rule.kv))

    def timer_fired(self, event: said.TimerFired) -> None:
        """Late participants are treated as `on_failure` says. One that does not even go back, or does not resume, is
        removed."""
        update = self.update
        if update is None or event.timer != update.timer:
            return
        failed = update.failed
        for engine in [self._ctx.engines[i] for i in update.wave]:
            if self.update is not update:
                return
            waits = engine.state == "paused" and update.path in RENDEZVOUS and not failed
            if waits or engine.state in ("ready", "serving", "lost"):
                continue
            if failed or engine.index in update.overdue:
                self._remove(engine)
            elif engine.state == "resuming":
                update.overdue.add(engine.index)
            else:
                self._trouble(engine, update)
        if self.update is update and update.timer == event.timer:
            self._arm(update)

    def engine_lost(self, engine: Engine) -> None:
        """The barrier goes on without it; its turns go elsewhere."""
        if engine.state == "lost":
            return
        self._advance(engine, "lose")
        self._cut_short.add(engine.index)
        self._rollouts.engine_lost(engine)
        update = self.update
        if update is None or engine.index not in update.members:
            return
        update.set_wave(tuple(i for i in update.wave if i != engine.index))
        if not update.failed and update.wave:
            if self._rule.pause_generation_mode == "finish":
                self._drained(update)
            self._arm_when_drained(update)
            if update.path in RENDEZVOUS:
                self._rendezvous(update)
            self._barrier(update)
        self._wave_over(update)

    # --- engines that were away ---------------------------------------------------------------------------------------

    def leave(self, engine: Engine) -> None:
        """Its GPUs change to training."""
        self._rollouts.close(engine.index)
        self._advance(engine, "leave")
        engine.leaving = False
        self._rollouts.router.cache_dropped(engine.index)

    def returned(self, engines: list[Engine]) -> None:
        """Their GPUs are back in generation."""
        for engine in engines:
            self._advance(engine, "return")
        update = self.update
        begins = update if update is not None and update.waits_for_pool and update.prepared else None
        for engine in engines:
            if engine.version < self._p.deployed:
                self._catch_up.append(engine.index)
            elif begins is None or engine.index not in begins.participants:
                self._rollouts.open(engine.index)
        if update is not None:
            update.waits_for_pool = False
        if begins is not None:
            self._begin(begins)
        self.pump()

    def joined(self, event: said.EngineJoined, away: bool) -> None:
        """`away`: its pool trains at the moment."""
        engine = self._ctx.engines[event.engine]
        self._advance(engine, "join_away" if away else "join")
        engine.version = event.version
        if away or engine.leaving:
            return
        if engine.version < self._p.deployed:
            self._catch_up.append(engine.index)
            self.pump()
        else:
            self._rollouts.open(engine.index)

    def _start_catch_up(self) -> None:
        """Engines that missed publications copy the deployed version; there is nothing to prepare."""
        indexes = self._takes_part(tuple(dict.fromkeys(self._catch_up)))
        self._catch_up = []
        behind = tuple(i for i in indexes if self._ctx.engines[i].version < self._p.deployed)
        if not behind:
            return
        shared = all(self._ctx.layout.pools[self._ctx.engines[i].pool].shared for i in behind)
        path = "cuda_ipc" if shared else choose_path(self._weights, self._path_costs)[0]
        self.update = Update(self._p.deployed, path, behind, catch_up=True)
        self._begin(self.update)
