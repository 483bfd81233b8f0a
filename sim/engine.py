"""One SGLang engine in virtual time: the scheduler's rules with durations from a cost model.

It knows when iterations start and end, when results become visible, and what pausing, weight changes and memory release
do to requests. It refuses to know who sends requests and why, and it never reads a clock: every call carries `now`.

How it is driven. `wake_at` is when the engine next has something to say or needs to take in what has arrived; call
`advance(wake_at)` then, after everything else of that instant, and look at `wake_at` again. An iteration takes in every
request that came no later than its start. So `advance` returns as soon as it has notices of the instant `now` (the
caller may answer them with requests of the same instant) and forms the next batch when it is called again.

The engine is lazy: between two calls its state is that of the iteration boundary `t`, and a planned run of decode steps
is carried out when it is over or something cuts it. A request that can only join the queue (no free row, or the latch
`batch_is_full` set) does not cut a run.
"""

from __future__ import annotations

from math import inf
from typing import Any, Final

from sim.costs.base import CostModel
from sim.engine_notices import Aborted, Finished, Notice, Paused
from sim.engine_request import Request
from sim.engine_scheduler import DECODE, EXTEND, NOTHING, EngineModelOptions, Scheduler
from sim.errors import EngineStuck, PrefillOutOfMemory

__all__ = [
    "Aborted",
    "EngineModel",
    "EngineModelOptions",
    "EngineStuck",
    "Finished",
    "Notice",
    "Paused",
    "PrefillOutOfMemory",
    "Request",
]

_Aborted: Final = Aborted
_Finished: Final = Finished
_SUBMIT: Final = 0
_ABORT: Final = 1
_PAUSE: Final = 2
_COSTS: Final = 3
PAUSE_MODES = ("abort", "retract", "in_place")


class EngineModel(Scheduler):
    """`mode`: `skip` takes runs of equal decode steps at once; `iterate`, the reference, takes every iteration."""

    __slots__ = [
        "_base",
        "_edge",
        "_form",
        "_k",
        "_open",
        "_total",
        "_whole",
        "closed",
        "costs",
        "decode_s",
        "device",
        "draining",
        "due",
        "due_from",
        "due_until",
        "forms_next",
        "gpu_end",
        "held",
        "inbox",
        "live",
        "paused",
        "prefill_s",
        "recompute_s",
        "released",
        "skip",
        "t",
        "wake_at",
    ]

    def __init__(self, options: EngineModelOptions, costs: CostModel, mode: str = "skip") -> None:
        super().__init__(options)
        if mode not in ("skip", "iterate"):
            raise ValueError(f"mode {mode!r} is skip or iterate")
        if options.forward not in ("device", "host"):
            raise ValueError(f"forward {options.forward!r} is device or host")
        self.costs = costs
        self.padded_attention = costs.padded_attention
        self.skip = mode == "skip"
        self.device = options.forward == "device" and self.overlap
        """Whether launching a batch takes no time and an iteration lasts until the previous batch's forward ends."""
        self.t = 0.0
        """Start of the next iteration: the state is that of this instant."""
        self.gpu_end = 0.0
        """When the forward of the batch launched last ends."""
        self.wake_at = inf
        self.paused = False
        """No batch is launched."""
        self.closed = False
        """Requests wait outside until `resume` (from the call of `pause` on)."""
        self.released = False
        """The GPU memory belongs to someone else."""
        self.draining = False
        """Pausing with `abort`: paused as soon as no request is open."""
        self.inbox: list[tuple[float, int, Any]] = []
        """What has arrived since the last iteration started."""
        self.held: list[Request] = []
        self.live: dict[Any, Request] = {}
        self.due: list[Notice] = []
        """Notices not yet returned, in time order."""
        self.due_from = self.due_until = inf
        """Times of the first and the last of them."""
        self.prefill_s = self.recompute_s = self.decode_s = 0.0
        """GPU seconds so far: prompts computed for the first time, computed again, and decode steps (of whole
        iterations)."""
        self._k = -1
        """Steps of the planned run; -1: no run."""
        self._base = 0.0
        self._total = 0.0
        self._whole = 0
        """Duration of the planned run of `_whole` steps."""
        self._edge = -1.0
        """The boundary at which the planned run ends, if it has been worked out."""
        self._form = False
        """Whether an iteration is to be formed after the planned run."""
        self.forms_next = False
        """Whether the next wake-up starts an iteration (and does not end one or carry news)."""
        self._open = False
        """Whether an arrival would be looked at during the planned run."""

    # --- what is asked of it ------------------------------------------------------------------------------------------

    def submit(self, now: float, request: Request) -> None:
        """A request arrives. While the engine is paused or its memory released it waits outside.

        Raises ValueError if a request with this `rid` is open, or if its runs do not hold `prompt_tokens` tokens.
        """
        rid, content = request.rid, request.content
        if len(content) == 1:
            tokens: int = content[0][2]
        else:
            tokens = sum([n for _, _, n in content])
        if tokens != request.prompt_tokens:
            raise ValueError(f"request {rid!r}: its runs hold {tokens} tokens, not {request.prompt_tokens}")
        if self.live.setdefault(rid, request) is not request:
            raise ValueError(f"request {rid!r} is open already")
        if self.closed or self.released:
            self.held.append(request)
            return
        self.inbox.append((now, _SUBMIT, request))
        if self.wake_at > now:
            if self._k < 0:
                self._rouse(now)
            elif self._open:
                self._cut(now)

    def abort(self, now: float, rid: Any) -> None:
        """Abort a request; a request that is not open any more is ignored.

        Waiting: gone at the next iteration. Running: ends with its next token, which is kept. Half prefilled: gone at
        the next iteration, its last chunk unpublished.
        """
        r = self.live.get(rid)
        if r is None:
            return
        if r in self.held:
            self.held.remove(r)
            r.abort, r.done = "aborted", True
            self._say_now(r, now)
        elif self.paused:
            if self.abort_request(r):
                self._say_now(r, now)
        else:
            self._control(now, _ABORT, r)

    def pause(self, now: float, mode: str) -> None:
        """Stop at the next iteration boundary; `Paused` says when. From now on new requests wait outside.

        `retract`: the results in flight are handled, then everything goes back to the queue and its KV is given up
        (prompts stay in the cache). `in_place`: everything stays as it is. `abort`: everything is aborted. Raises
        ValueError for another mode, RuntimeError if already paused.
        """
        if mode not in PAUSE_MODES:
            raise ValueError(f"pause mode {mode!r} is one of {', '.join(PAUSE_MODES)}")
        if self.closed:
            raise RuntimeError("the engine is paused already")
        self.closed = True
        if self.released:
            self.paused = True
            self._announce(Paused(now, mode), now)
            self.forms_next = False
            self.wake_at = now
        else:
            self._control(now, _PAUSE, mode)

    def resume(self, now: float) -> None:
        """Go on; requests that waited outside arrive now. Raises RuntimeError if not paused."""
        if not self.paused:
            raise RuntimeError("the engine is not paused")
        self.paused = self.closed = False
        self._let_in(now)

    def flush(self, now: float) -> bool:
        """Forget the cache. Refused (False) while a batch exists, and while requests wait unless paused."""
        self._let_go()
        if self.busy or (not self.paused and (self.queue or self.inbox)):
            return False
        self.clear()
        return True

    def clear(self) -> None:
        """Forget the cache, and the KV that waiting requests bring."""
        super().clear()
        if self.takes_in:
            for r in self.live.values():
                r.brought = None

    def set_version(self, now: float, version: int) -> None:
        """New weights. Raises RuntimeError unless paused or idle."""
        if not self.paused and (self.batch or self.chunked is not None or self.queue):
            raise RuntimeError("weights change while the engine is paused or idle, not while it generates")
        self.record_version(version)
        if self.cache.emptied:
            self.cache.forget_namespaces({r.namespace for r in self.live.values()})

    def release_memory(self, now: float) -> None:
        """The GPU goes to someone else; the cache is gone.

        Raises RuntimeError while a batch exists, or requests wait and the engine is not paused.
        """
        self._let_go()
        if self.busy or (not self.paused and (self.queue or self.inbox)):
            raise RuntimeError("memory can be released only when no request is running or waiting")
        self.clear()
        self.released = True

    def resume_memory(self, now: float) -> None:
        """The GPU is back. Raises RuntimeError if it was not released."""
        if not self.released:
            raise RuntimeError("the engine's memory was not released")
        self.released = False
        if not self.closed:
            self._let_in(now)

    def use_costs(self, now: float, costs: CostModel) -> None:
        """Another source of step times, from the next iteration on (the machine is shared with something that begins or
        ends)."""
        if self.paused or self.released or self.wake_at == inf:
            self.costs = costs
        else:
            self._control(now, _COSTS, costs)

    # --- what can be read ---------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Requests that hold KV."""
        return len(self.batch) + (self.chunked is not None)

    @property
    def waiting(self) -> int:
        """Requests that do not, wherever they wait."""
        return len(self.queue) + len([kind for _, kind, _ in self.inbox if kind == _SUBMIT]) + len(self.held)

    @property
    def kv_total(self) -> int:
        return self.slots

    @property
    def kv_used(self) -> int:
        """Slots of running requests; cached prefixes nobody uses do not count."""
        return self.slots - self.cache.free - self.cache.evictable

    def held_prefix(self, r: Request, tokens: int) -> tuple[int, int]:
        """(leading tokens of its prompt whose KV is cached here, at most `tokens`; the oldest version among them)."""
        node, length = self.cache.longest(r.namespace, r.content, min(tokens, r.prompt_tokens))
        return length, node.version

    def sync(self, now: float) -> None:
        """Bring counters and KV use up to an iteration boundary shortly before `now`; for reports.

        Results do not change; `wake_at` may, in its last digits.
        """
        k = self._k
        if k <= 0 or now <= self.t:
            return
        count = len(self.batch)
        if self.device:
            j = self.costs.steps_within(count, self.context + count, now - self._base) + 1 if now >= self._base else 0
        else:
            j = self.costs.steps_within(count, self.context + count, now - self.t)
        j = min(j, k - 1)
        if j > 0:
            self._commit(j)
            self._plan()

    # --- time ---------------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> list[Notice]:
        """Run up to `now`; the notices up to then, in time order. See the module's text for who calls it when."""
        out: list[Notice] = []
        while self.wake_at <= now:
            due = self.due
            if due and self.due_from <= now:
                if self.due_until <= now:
                    self.due = []
                    if out:
                        out += due
                    else:
                        out = due
                else:
                    while due[0].t <= now:
                        out.append(due.pop(0))
                    self.due_from = due[0].t
                self._plan()
                if self.t >= now:
                    break
                continue
            if self._k > 0:
                self._commit(self._k)
            if self._form:
                self._iterate()
            if self.due:
                self._k = -1
                self._form = self.forms_next = False
                self.wake_at = self.due_from
            else:
                self._plan()
        return out

    def _plan(self) -> None:
        """Decide what comes next from the boundary `t`, and when to wake."""
        self._k = -1
        self._form = self.forms_next = False
        if self.due:
            self.wake_at = self.due_from
            return
        if self.paused or self.released:
            self.wake_at = inf
            return
        inbox, t = self.inbox, self.t
        taken = 0
        for at, kind, payload in inbox:
            if at > t:
                break
            if kind != _SUBMIT:
                del inbox[:taken]
                self._k = 0
                self._form = self.forms_next = True
                self.wake_at = t
                return
            self.enqueue(payload)
            taken += 1
        if taken:
            del inbox[:taken]
        batch = self.batch
        running = len(batch)
        self._open = opened = self.preempts or (
            self.rows > 0 and running < self.max_run and not (self.full and running)
        )
        if not self.skip or not running or self.chunked is not None or (opened and self.queue):
            k = 0
        else:
            k = self.steps_ahead()
        if k <= 0:
            if not self.busy and not self.queue:
                if self.draining:
                    self.draining = False
                    self.paused = True
                    self._announce(Paused(t, "abort"), t)
                    self.wake_at = t
                elif inbox:
                    self._rouse(inbox[0][0])
                else:
                    self.wake_at = inf
                return
            self._k = 0
            self._form = self.forms_next = True
            self.wake_at = t
            return
        self._k = self._whole = k
        self._edge = -1.0
        context = self.context + running
        costs = self.costs
        self._total = total = costs.run_time(running, context, k)
        if self.device:
            base = self.gpu_end if self.last and self.gpu_end > t else t
            self._base = base
            if k + self.steps == self.finish_key:
                # the finish is handled in the next iteration, which lasts until this run's last forward ends
                self._form = True
                self.wake_at = base + total
            else:
                self.wake_at = self._edge = base + costs.run_time(running, context, k - 1) if k > 1 else base
        else:
            self._base = t
            self.wake_at = t + total
        if inbox:
            for at, kind, _ in inbox:
                if kind != _SUBMIT or self._open:
                    self._cut(at, kind != _SUBMIT)
                    break

    def _cut(self, at: float, control: bool = False) -> None:
        """End the planned run at the first iteration boundary from `at` on, if that comes before its end (at its end
        too for what is handled before the next batch is formed: an abort or a pause)."""
        base, costs = self._base, self.costs
        if at <= self.t:
            j, boundary = 0, self.t
        else:
            count = len(self.batch)
            context = self.context + count
            j = costs.steps_within(count, context, at - base) if at > base else 0
            boundary = base + costs.run_time(count, context, j) if j else base
            while boundary < at:
                j += 1
                boundary = base + costs.run_time(count, context, j)
            if self.device:
                j += 1
        if j < self._k or (control and j == self._k):
            self._k = j
            self._form = self.forms_next = False
            self.wake_at = self._edge = boundary

    def _commit(self, k: int) -> None:
        """Carry out `k` steps of the planned run; the state becomes that of the boundary after them."""
        t, base, count = self.t, self._base, len(self.batch)
        context = self.context + count
        costs = self.costs
        total = self._total if k == self._whole else costs.run_time(count, context, k)
        if self.device:
            self.gpu_end = base + total
            if self._edge >= 0.0 and k == self._k:
                self.t = self._edge
            elif self._form and not self.inbox and k == self._k:
                self.t = (
                    self.gpu_end
                )  # nothing can be admitted at the boundary, and the next iteration ends here anyway
            else:
                self.t = base if k == 1 else base + costs.run_time(count, context, k - 1)
        else:
            self.t = t + total
        self.decode_s += total
        if self.last == EXTEND and self.overlap:  # the first step comes with the results of a prefill
            self.run_after_prefill(k, base if self.device else t + costs.decode_time(count, context))
        else:
            self.run(k)
        if self.ended:
            self._say_ended(self.t)

    def _iterate(self) -> None:
        """One iteration from the boundary `t`."""
        if self.inbox:
            self._take_in()
            if self.paused:
                return
        t = self.t
        idle = self.last == NOTHING and not self.batch and self.chunked is None
        end = self.gpu_end if self.device and self.last and self.gpu_end > t else t
        deferring = self.defer
        kind = self.form(t)
        if self.ended:
            self._say_ended(t)
        if kind:
            if kind == DECODE:
                seconds = self.costs.decode_time(len(self.batch), self.context)
                self.decode_s += seconds
            else:
                new = self.prefill_new
                seconds = self.costs.prefill_time(new, self.prefill_attention, len(self.formed))
                if self.loaded_tokens:
                    seconds = max(seconds, self.loaded_tokens / self.options.load_back_tokens_per_s)
                again = seconds * self.prefill_again / new
                self.recompute_s += again
                self.prefill_s += seconds - again
            if self.device:
                gpu_end = self.gpu_end
                self.gpu_end = (gpu_end if gpu_end > t else t) + seconds
            else:
                end = t + seconds
        elif idle and self.queue and not deferring:
            r = self.queue[0]
            raise EngineStuck(
                f"request {r.rid!r} ({r.prompt_tokens} prompt tokens, max_new_tokens {r.limit}) "
                f"does not fit in {self.slots} slots"
            )
        self.settle(kind, end)
        self.t = end
        if self.ended:
            self._say_ended(end)

    # --- messages -----------------------------------------------------------------------------------------------------

    def _control(self, now: float, kind: int, payload: Any) -> None:
        """Something that must be handled at the next iteration boundary."""
        self.inbox.append((now, kind, payload))
        if self.wake_at > now:
            if self._k < 0:
                self._rouse(now)
            else:
                self._cut(now, True)

    def _rouse(self, now: float) -> None:
        """Something arrives at an idle engine: its next iteration starts now. Idle iterations reset the ratio."""
        if self.due or self.paused:
            return
        if now > self.t:
            self.ratio.reset()
            self.defer = 0
            self.t = now
        self._k = 0
        self._form = self.forms_next = True
        self.wake_at = self.t

    def _let_in(self, now: float) -> None:
        """Requests that waited outside arrive, and the next iteration starts no earlier than now."""
        for r in self.held:
            self.inbox.append((now, _SUBMIT, r))
        self.held = []
        if now > self.t:
            self.t = now
        self._plan()

    def _let_go(self) -> None:
        """An overshoot step in which nobody is left is not waited for."""
        if self.last and not self.batch and self.chunked is None and not self.flight:
            if self.device and self.gpu_end > self.t:
                self.t = self.gpu_end
            self.last = NOTHING
            if not self.due and not self.queue and not self.inbox:
                self._plan()

    def _take_in(self) -> None:
        """Handle what has arrived up to the boundary `t`, in order."""
        inbox, taken = self.inbox, 0
        while taken < len(inbox) and inbox[taken][0] <= self.t:
            _, kind, payload = inbox[taken]
            taken += 1
            if kind == _SUBMIT:
                self.enqueue(payload)
            elif kind == _ABORT:
                if self.abort_request(payload):
                    self._say(payload, self.t)
            elif kind == _COSTS:
                self.costs = payload
            else:
                self._pause(payload)
        del inbox[:taken]

    def _pause(self, mode: str) -> None:
        if mode == "abort":
            t = self.t
            for r in list(self.queue):
                self.abort_request(r)
                self._say(r, t)
            for r in self.batch.values():
                self.abort_request(r)
            if self.chunked is not None:
                self.abort_request(self.chunked)
            self.draining = True
            return
        if self.device and self.last and self.gpu_end > self.t:
            self.t = self.gpu_end
        if mode == "retract":
            self.put_all_back(self.t)
            self._say_ended(self.t)
        self.paused = True
        self._announce(Paused(self.t, mode), self.t)

    # --- notices ------------------------------------------------------------------------------------------------------

    def _announce(self, notice: Notice, t: float) -> None:
        """To be returned once `t`, its time, has come: not before that of any other."""
        if not self.due:
            self.due_from = t
        self.due_until = t
        self.due.append(notice)

    def _say_ended(self, t: float) -> None:
        for r in self.ended:
            self._say(r, t)
        self.ended = []

    def _say_now(self, r: Request, now: float) -> None:
        """A notice that comes before others already due."""
        due, self.due = self.due, []
        self._say(r, now)
        self.due = due = sorted([*due, *self.due], key=_time)
        self.due_from, self.due_until = due[0].t, due[-1].t
        self.forms_next = False
        self.wake_at = min(self.wake_at, now)

    def _say(self, r: Request, t: float) -> None:
        """The notice that `r` has ended."""
        del self.live[r.rid]
        outputs = r.out if r.out < r.limit or r.abort else r.limit
        spans = ((self.version, 0, outputs),) if r.events is None and outputs else r.spans(outputs, self.version)
        kind = _Aborted if r.abort else _Finished
        reason = r.abort or ("stop" if r.stops and r.final == r.output_tokens else "length")
        notice = kind(
            r.rid, t, outputs, spans, r.cached, r.started_t, r.first_t, reason, r.recomputed, r.kv_version, r.retracted
        )
        self._announce(notice, t)


def _time(notice: Notice) -> float:
    return notice.t
