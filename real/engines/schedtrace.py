"""Plugin of an SGLang server: writes every decision of its scheduler to a file, and can release requests by iteration.

It runs inside SGLang's scheduler process (entry point `sglang.srt.plugins`), edits none of its files and imports
nothing of this repository, so that a server in another environment can load it. It refuses to know what the decisions
should be. The lines are described in `tests/data/sglang_scheduler_traces/README.md`.

Environment: `SCHED_TRACE`: the file of JSON lines; unset: the plugin does nothing. `SCHED_PLAN`: a file that may hold a
plan, `{"steps": [[at, what, argument], ...]}`: the scheduler carries the steps out in order, a step before the `at`-th
iteration from the start of the plan, waits for requests that have not arrived, and removes the file in the end. `what`:
`arrive` (the request with this id, held until then), `abort` (id), `pause` (mode), `resume`, `flush`, `version` (name).
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

ENTRY_POINT = ("sglang.srt.plugins", "schedtrace", "real.engines.schedtrace:install")
"""Group, name and object of the entry point with which a server finds it."""

_SETTINGS = (
    "schedule_policy",
    "schedule_conservativeness",
    "enable_priority_scheduling",
    "disable_priority_preemption",
    "schedule_low_priority_values_first",
    "priority_scheduling_preemption_threshold",
    "retraction_policy",
    "prefill_decode_interval",
    "prefill_decode_interval_min_bs",
    "disable_overlap_schedule",
    "disable_radix_cache",
    "enable_mixed_chunk",
    "enable_prefill_delayer",
    "prefill_max_requests",
    "max_queued_requests",
    "radix_eviction_policy",
    "enable_hierarchical_cache",
    "enable_lora",
    "speculative_algorithm",
    "disaggregation_mode",
    "tp_size",
    "dp_size",
    "pp_size",
)
"""Server arguments that change scheduling, written down as the server resolved them."""
_ENVIRONMENT = (
    "SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS",
    "SGLANG_INIT_NEW_TOKEN_RATIO",
    "SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR",
    "SGLANG_RETRACT_DECODE_STEPS",
    "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION",
    "SGLANG_MAX_NEW_TOKENS_LIMIT",
    "SGLANG_ENABLE_WAITING_PREFIX_REFRESH",
    "SGLANG_RADIX_FORCE_MISS",
    "SGLANG_TEST_RETRACT",
    "IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD",
    "IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD",
)
"""Environment variables that change scheduling."""


def install() -> None:
    """Wrap the scheduler's methods. Raises AttributeError where this SGLang has none of that name."""
    if os.environ.get("SCHED_TRACE"):
        _Tracer(os.environ["SCHED_TRACE"], os.environ.get("SCHED_PLAN")).wrap()


class _Tracer:
    def __init__(self, path: str, plan: str | None) -> None:
        self.path, self.plan_path = path, plan
        self.file: Any = None
        self.n = 0
        """Iterations of the scheduler's loop so far."""
        self.choosing = False
        """Whether an iteration's batch is being chosen."""
        self.drained: list[Any] | None = None
        """Requests ended by the results that a pause handles, while it does."""
        self.scheduler: Any = None
        self.known: set[str] = set()
        self.asked: dict[str, Any] = {}
        """`max_new_tokens` as the client asked for it, until the request is written down."""
        self.steps: list[list[Any]] = []
        self.held: dict[str, Any] = {}
        self.start = 0
        """Iteration at which the plan has begun."""

    def out(self, **line: Any) -> None:
        if self.file is None:
            self.file = open(self.path, "a", buffering=1)  # noqa: SIM115  # closed with the process
        self.file.write(json.dumps(line) + "\n")

    # --- what is written ----------------------------------------------------------------------------------------------

    def pools(self) -> dict[str, int]:
        s = self.scheduler
        return {
            "avail": int(s.token_to_kv_pool_allocator.available_size()),
            "evict": int(s.tree_cache.evictable_size()),
            "prot": int(s.tree_cache.protected_size()),
            "rows": int(s.req_to_token_pool.available_size()),
        }

    def said(self, event: str, **more: Any) -> None:
        """Something that happened between two iterations, with the state after it."""
        s = self.scheduler
        self.out(e=event, n=self.n + 1, w=[r.rid for r in s.waiting_queue], **more, **self.pools())

    def begin(self, scheduler: Any) -> None:
        import sglang

        self.scheduler = s = scheduler
        args = s.server_args
        self.out(
            e="start",
            sglang=sglang.__version__,
            engine={
                "max_total_num_tokens": int(s.max_total_num_tokens),
                "max_running_requests": int(s.max_running_requests),
                "page_size": int(s.page_size),
                "max_prefill_tokens": int(s.max_prefill_tokens),
                "chunked_prefill_size": s.chunked_prefill_size or -1,
                "context_length": int(s.max_req_len) + 1,
                **{name: getattr(args, name, None) for name in _SETTINGS},
            },
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        )

    def arrived(self, req: Any) -> None:
        params = req.sampling_params
        self.known.add(req.rid)
        self.out(
            e="request",
            rid=req.rid,
            input_ids=list(req.origin_input_ids),
            max_new_tokens=self.asked.pop(req.rid, params.max_new_tokens),
            limit=params.max_new_tokens,
            ignore_eos=bool(params.ignore_eos),
            logprob_start_len=req.logprob_start_len if req.return_logprob else -1,
            extra_key=req.extra_key,
            cache_salt=req.cache_salt,
            priority=req.priority,
            refused=req.to_finish is not None,
        )

    def ended(self, req: Any, reason: Any) -> None:
        self.out(
            e="end",
            rid=req.rid,
            output_ids=list(req.output_ids),
            finish_reason=reason,
            cached_tokens=req.cached_tokens,
            num_retractions=req.retraction_count,
            versions=[[v.old_version, v.num_output_tokens] for v in req.weight_version_events],
        )

    # --- the plan -----------------------------------------------------------------------------------------------------

    def look_for_plan(self) -> None:
        if self.plan_path is not None and not self.steps and os.path.exists(self.plan_path):
            with open(self.plan_path) as f:
                self.steps, self.start = json.load(f)["steps"], self.n

    def take(self, messages: Any) -> list[Any]:
        """Hold the requests that the plan names; the others."""
        planned = {argument for _, what, argument in self.steps if what == "arrive"}
        through = []
        for m in messages or []:
            if type(m).__name__ == "TokenizedGenerateReqInput" and m.rid in planned:
                self.held[m.rid] = m
            else:
                through.append(m)
        return through

    def carry_out(self, receiver: Any, pull: Any) -> list[Any]:
        """Steps of the plan whose iteration is next; what else has come meanwhile is returned."""
        from sglang.srt.managers import io_struct as io

        s, through = self.scheduler, []
        while self.steps and self.steps[0][0] <= self.n - self.start:
            _, what, argument = self.steps[0]
            if what == "arrive":
                while argument not in self.held:
                    time.sleep(0.001)
                    through += self.take(pull(receiver))
                message = self.held.pop(argument)
                receiver.unwrap_pickle_wrapper([message])
                s.process_input_requests([message])
            elif what == "abort":
                s.process_input_requests([io.AbortReq(rid=argument)])
            elif what == "pause":
                s.process_input_requests([io.PauseGenerationReqInput(mode=argument)])
            elif what == "resume":
                s.process_input_requests([io.ContinueGenerationReqInput(torch_empty_cache=False)])
            elif what == "flush":
                s.flush_cache()
            elif what == "version":
                s.record_weight_version_change(argument)
            else:
                raise ValueError(f"plan step {what!r}")
            del self.steps[0]
            if not self.steps:
                os.unlink(self.plan_path)  # type: ignore[arg-type]  # done
        return through

    # --- the wrappers -------------------------------------------------------------------------------------------------

    def wrap(self) -> None:
        from sglang.srt.managers import schedule_batch, schedule_policy, scheduler
        from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        cls, tracer = scheduler.Scheduler, self
        if getattr(cls, "_schedtrace", False):
            return
        cls._schedtrace = True

        def around(owner: Any, name: str) -> Any:
            """Decorator: `f(original, self, *args)` in place of a method."""

            def decorate(f: Any) -> Any:
                original = getattr(owner, name)
                setattr(owner, name, lambda self, *args, **kwargs: f(original, self, *args, **kwargs))
                return f

            return decorate

        @around(SchedulerRequestReceiver, "_pull_raw_reqs")
        def _(original: Any, receiver: Any) -> Any:
            if tracer.scheduler is None:
                return original(receiver)
            tracer.look_for_plan()
            through = tracer.take(original(receiver))
            return through + tracer.carry_out(receiver, original) if tracer.steps else through

        @around(cls, "run_event_loop")
        def _(original: Any, s: Any) -> Any:
            tracer.begin(s)
            return original(s)

        @around(cls, "maybe_sleep_on_idle")
        def _(original: Any, s: Any) -> Any:
            return None if tracer.steps else original(s)

        @around(cls, "init_req_max_new_tokens")
        def _(original: Any, s: Any, req: Any) -> Any:
            tracer.asked[req.rid] = req.sampling_params.max_new_tokens
            return original(s, req)

        @around(cls, "_add_request_to_queue")
        def _(original: Any, s: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
            new = req.rid not in tracer.known
            if new:
                tracer.arrived(req)
            r = original(s, req, *args, **kwargs)
            if new:
                tracer.out(
                    e="recv", n=tracer.n + 1, l=[["TokenizedGenerateReqInput", req.rid, len(req.origin_input_ids)]]
                )
            return r

        @around(cls, "abort_request")
        def _(original: Any, s: Any, message: Any) -> Any:
            r = original(s, message)
            tracer.said("abort", rid=message.rid, all=bool(message.abort_all))
            return r

        @around(cls, "send_abort_output")
        def _(original: Any, s: Any, message: Any, req: Any) -> Any:
            tracer.ended(req, {"type": "abort"})
            return original(s, message, req)

        @around(cls, "pause_generation")
        def _(original: Any, s: Any, message: Any) -> Any:
            tracer.drained = []
            r = original(s, message)
            tracer.said("pause_generation", mode=message.mode, fin=tracer.drained)
            tracer.drained = None
            return r

        for name in ("continue_generation", "flush_cache", "record_weight_version_change"):

            @around(cls, name)
            def _(original: Any, s: Any, *args: Any, _name: str = name, **kwargs: Any) -> Any:
                r = original(s, *args, **kwargs)
                version = [*args, *kwargs.values()][0] if _name == "record_weight_version_change" else None
                tracer.said(_name, ret=r if isinstance(r, bool) else None, version=version)
                return r

        @around(cls, "get_next_batch_to_run")
        def _(original: Any, s: Any, running_batch: Any, last_batch: Any) -> Any:
            tracer.n += 1
            before = [r.rid for r in s.waiting_queue]
            tracer.choosing = True
            plan = original(s, running_batch=running_batch, last_batch=last_batch)
            tracer.choosing = False
            b = plan.batch_to_run
            idle = b is None and last_batch is None and s.chunked_req is None
            if idle and not before and not plan.running_batch.reqs:
                return plan
            line: dict[str, Any] = {
                "e": "next",
                "n": tracer.n,
                "mode": b.forward_mode.name if b else None,
                "w0": before,
                "w": [r.rid for r in s.waiting_queue],
                "run": [r.rid for r in plan.running_batch.reqs],
                "full": bool(plan.running_batch.batch_is_full),
                "ck": s.chunked_req.rid if s.chunked_req else None,
                "ratio": s.new_token_ratio_tracker.current,
                **tracer.pools(),
            }
            if b and b.forward_mode.is_extend():
                line["reqs"] = [[r.rid, p, n] for r, p, n in zip(b.reqs, b.prefix_lens, b.extend_lens, strict=True)]
            elif b:
                kv = b.seq_lens_cpu.tolist()
                line["reqs"] = [[r.rid, int(n), len(r.output_ids)] for r, n in zip(b.reqs, kv, strict=True)]
            tracer.out(**line)
            return plan

        @around(cls, "process_batch_result")
        def _(original: Any, s: Any, batch: Any, result: Any) -> Any:
            before = {id(r) for r in batch.reqs if r.finished()}
            r = original(s, batch, result)
            done = [q for q in batch.reqs if q.finished() and id(q) not in before]
            for q in done:
                tracer.ended(q, q.finished_reason.to_json())
            fin = [
                [q.rid, len(q.origin_input_ids), len(q.output_ids), type(q.finished_reason).__name__, q.cached_tokens]
                for q in done
            ]
            if tracer.drained is not None:
                tracer.drained += fin
            else:
                tracer.out(e="proc", n=tracer.n, fin=fin, **tracer.pools())
            return r

        @around(schedule_batch.ScheduleBatch, "retract_decode")
        def _(original: Any, batch: Any) -> Any:
            before = [[r.rid, len(r.origin_input_ids), len(r.output_ids)] for r in batch.reqs]
            r = original(batch)
            gone, ratio, lost = r
            tracer.out(
                e="retract",
                n=tracer.n,
                before=before,
                out=[x.rid for x in gone],
                ratio=ratio,
                abort=[x.rid for x in lost],
            )
            return r

        @around(schedule_policy.PrefillAdder, "preempt_to_schedule")
        def _(original: Any, adder: Any, req: Any) -> Any:
            before = len(adder.preempt_list)
            r = original(adder, req)
            if r:
                tracer.out(e="preempt", n=tracer.n, by=req.rid, out=[x.rid for x in adder.preempt_list[before:]])
            return r

        @around(UnifiedRadixCache, "_evict")
        def _(original: Any, tree: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
            r = original(tree, params, *args, **kwargs)
            tracer.out(
                e="evict",
                n=tracer.n if tracer.choosing else tracer.n + 1,
                want=params.num_tokens,
                got=r.num_tokens_evicted,
            )
            return r
