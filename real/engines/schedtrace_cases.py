"""The cases of the engine check: server configurations, and what is sent to each to reach its rules.

Responsible for workloads as data. Refuses to know servers and what a scheduler should do with them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from real.engines.client import EngineClient
from real.engines.schedtrace_run import Ask, Script, Step, TraceCase, conversations

VOCABULARY = 60
"""Token ids are drawn below this, which every model has."""


def ids(seed: int, tokens: int) -> tuple[int, ...]:
    rnd = random.Random(seed)
    return tuple(rnd.randrange(2, VOCABULARY) for _ in range(tokens))


def script(asks: Sequence[tuple[int, Ask]], steps: Sequence[Step] = ()) -> Script:
    """Requests with the iteration at which each arrives, and further steps; of one iteration, arrivals come first."""
    arrivals: list[Step] = [(at, "arrive", ask.rid) for at, ask in asks]
    return Script(tuple(ask for _, ask in asks), tuple(sorted([*arrivals, *steps], key=lambda step: step[0])))


# --- several samples, namespaces, aborts ------------------------------------------------------------------------------


async def samples(client: EngineClient) -> None:
    """`n` samples a prompt: SGLang sends one `max_new_tokens=0` request first, then the samples."""
    asks = [Ask(f"n{i}", ids(100 + i, 40 + i), 12, temperature=1.0, n=n) for i, n in enumerate((4, 2, 8))]
    for ask in asks:
        await client.post("/generate", ask.body())
    await asyncio.gather(*(client.post("/generate", ask.body()) for ask in asks))


def namespaces() -> Script:
    """The same prompt under three `extra_key`s, twice each, and without one."""
    prompt = ids(7, 90)
    return script(
        [
            (20 * i, Ask(f"x{i}", (*prompt, 2 + i), 6, extra_key=key))
            for i, key in enumerate((None, "a", "b", "a", None, "b", "c", "a"))
        ]
    )


def aborts() -> Script:
    """Aborted while waiting, running, in the iteration of the last token, in the prefill's, half prefilled."""
    running = [(0, Ask(f"r{i}", ids(20 + i, 30), 40)) for i in range(4)]
    waiting = [(3, Ask(f"w{i}", ids(30 + i, 25), 20)) for i in range(3)]
    prefilled = [(12, Ask("p0", ids(40, 20), 30))]
    half = [(20, Ask("h0", ids(41, 400), 20)), (22, Ask("h1", ids(41, 260), 8))]
    last = [(40, Ask("l0", ids(42, 20), 5)), (40, Ask("l1", ids(43, 20), 9))]
    late = [(60, Ask("z0", ids(41, 300), 4)), (60, Ask("z1", ids(20, 30), 4))]
    return script(
        [*running, *waiting, *prefilled, *half, *last, *late],
        [
            (6, "abort", "w1"),
            (9, "abort", "r1"),
            (10, "abort", "nobody"),
            (13, "abort", "p0"),
            (14, "abort", "p0"),
            (24, "abort", "h0"),
            (44, "abort", "l0"),
            (45, "abort", "l1"),
            (50, "abort", "r2"),
            (50, "abort", "r3"),
        ],
    )


# --- pauses -----------------------------------------------------------------------------------------------------------


def pauses(mode: str) -> Script:
    """Paused while requests run, wait and are half prefilled; a flush and new weights while paused, then once more
    without a flush, and in the iteration after a prefill."""
    asks = [(0, Ask(f"{mode}{i}", ids(50 + i, 30), 60)) for i in range(3)]
    asks += [(2, Ask(f"{mode}{i}", ids(60 + i, 20), 30)) for i in range(3, 7)]
    asks += [(20, Ask(f"{mode}h", ids(70, 300), 20)), (50, Ask(f"{mode}l", ids(71, 40), 20))]
    steps: list[Step] = []
    for number, (at, between) in enumerate(
        (
            (8, ["flush", "version"]),
            (22, ["version"]),
            (30, ["flush"]),
            (31, ["version", "flush"]),
            (51, ["flush", "version"]),
            (52, ["version"]),
        )
    ):
        steps.append((at, "pause", mode))
        steps += [(at, what, f"{mode}-{number}") for what in between]
        steps.append((at, "resume", ""))
    return script(asks, steps)


def aborts_while_paused() -> Script:
    """Aborts of the waiting, the running and the half prefilled while the engine is paused, in either mode."""
    asks = [(0, Ask(f"q{i}", ids(80 + i, 30), 50)) for i in range(4)]
    asks += [(0, Ask(f"q{i}", ids(80 + i, 30), 20)) for i in range(4, 7)]
    asks += [(20, Ask("qh", ids(90, 300), 20)), (60, Ask("qg", ids(91, 300), 20))]
    return script(
        asks,
        [
            (6, "pause", "in_place"),
            (6, "abort", "q5"),
            (6, "abort", "q1"),
            (6, "resume", ""),
            (12, "pause", "retract"),
            (12, "abort", "q2"),
            (12, "flush", ""),
            (12, "resume", ""),
            (22, "pause", "in_place"),
            (22, "abort", "qh"),
            (22, "resume", ""),
            (62, "abort", "qg"),
            (62, "pause", "retract"),
            (62, "resume", ""),
        ],
    )


async def weight_updates(client: EngineClient) -> None:
    """What a publication does, over HTTP: each pause mode, new weights from disk, with and without a flush."""
    info = await client.get("/model_info")
    for i, (mode, flush) in enumerate((("retract", True), ("retract", False), ("in_place", False), ("abort", True))):
        asks = [Ask(f"u{i}.{k}", ids(200 + k, 40), 100) for k in range(6)]
        answers = [asyncio.create_task(client.post("/generate", ask.body())) for ask in asks]
        await asyncio.sleep(0.3)
        await client.pause(mode)  # type: ignore[arg-type]
        await client.update_from_disk(info["model_path"], weight_version=str(i + 1), flush_cache=flush)
        await client.resume()
        await asyncio.gather(*answers)
    await client.flush()


# --- memory -----------------------------------------------------------------------------------------------------------


def two_victims() -> Script:
    """Requests that share a prompt hold few slots of their own, so one victim does not free a step's slots."""
    prompt = ids(5, 150)
    return script([(3 * i, Ask(f"v{i}", (*prompt, 2 + i), 40, ignore_eos=False)) for i in range(14)])


def cannot_fit() -> Script:
    """A prompt that is prefilled in chunks with decode steps between them holds what the only running request needs."""
    return script(
        [(0, Ask("only", ids(8, 20), 150, ignore_eos=False)), (4, Ask("long", ids(9, 210), 4, ignore_eos=False))]
    )


# --- the order of the queue -------------------------------------------------------------------------------------------


def priorities(preempting: bool) -> Script:
    """Priorities out of order, equal ones, none at all; later ones that are higher by less and by more than 10."""
    first = [(0, Ask(f"a{i}", ids(300 + i, 30), 40, priority=p)) for i, p in enumerate((5, 5, 3, 1, None, 9, 5))]
    small = [(6, Ask("b0", ids(310, 20), 10, priority=12)), (8, Ask("b1", ids(311, 20), 10, priority=6))]
    large = [
        (12, Ask("c0", ids(312, 40), 30, priority=40)),
        (15, Ask("c1", ids(313, 40), 30, priority=41)),
        (18, Ask("c2", ids(302, 35), 30, priority=39)),
        (30, Ask("c3", ids(314, 200), 30, priority=100 if preempting else 50)),
        (33, Ask("c4", ids(315, 25), 12, priority=200)),
        (34, Ask("c5", ids(316, 25), 12, priority=300)),
    ]
    return script([*first, *small, *large])


def priorities_under_pressure() -> Script:
    """Requests that arrive one by one, so that all run, and grow beyond the pool."""
    given = (4, 9, 1, 7, 2, 8, None, 5)
    return script(
        [(3 * i, Ask(f"d{i}", ids(320 + i, 20), 60, ignore_eos=False, priority=p)) for i, p in enumerate(given)]
    )


def long_queue() -> Script:
    """160 requests at once: above 128 waiting, longest prefix first gives way to first come, first served."""
    shared = [ids(400 + k, 48) for k in range(6)]
    asks = [
        (0, Ask(f"k{i}", (*shared[i * 7 % 6], *ids(500 + i, 1 + i % 5)), 2 + i % 3, ignore_eos=True))
        for i in range(160)
    ]
    return script(asks)


# --- the cases --------------------------------------------------------------------------------------------------------

_FEW_STEPS = (("SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS", "5"),)


def _plain(name: str, about: str, seed: int, *args: str, count: int = 24, **more: Any) -> TraceCase:
    return TraceCase(name, about, (conversations(seed, count),), args, **more)


CASES: tuple[TraceCase, ...] = (
    TraceCase(
        "requests",
        "n > 1, extra_key, aborts, every pause mode with flushes and weight versions; chunks of 64",
        (
            samples,
            namespaces(),
            aborts(),
            pauses("retract"),
            pauses("in_place"),
            aborts_while_paused(),
            weight_updates,
        ),
        ("--schedule-conservativeness", "0.2"),
        max_total_tokens=900,
        max_running_requests=5,
        chunked_prefill_size=64,
    ),
    TraceCase(
        "requests_no_overlap",
        "the same without overlap",
        (
            samples,
            namespaces(),
            aborts(),
            pauses("retract"),
            pauses("in_place"),
            aborts_while_paused(),
        ),
        ("--schedule-conservativeness", "0.2", "--disable-overlap-schedule"),
        max_total_tokens=900,
        max_running_requests=5,
        chunked_prefill_size=64,
    ),
    TraceCase(
        "victims",
        "two victims in one retraction",
        (two_victims(),),
        ("--schedule-conservativeness", "0.02"),
        _FEW_STEPS,
        max_total_tokens=300,
    ),
    TraceCase(
        "cannot_fit",
        "a last request that cannot fit: decode steps between the chunks of a prompt",
        (cannot_fit(),),
        ("--schedule-conservativeness", "0.02", "--prefill-decode-interval", "50"),
        _FEW_STEPS,
        max_total_tokens=300,
        chunked_prefill_size=200,
    ),
    TraceCase(
        "priority",
        "priority scheduling with preemption",
        (priorities(True),),
        ("--enable-priority-scheduling", "--schedule-conservativeness", "0.3"),
        max_total_tokens=600,
        max_running_requests=3,
        chunked_prefill_size=64,
    ),
    TraceCase(
        "priority_no_preemption",
        "priority scheduling without preemption, retraction by priority",
        (priorities(False), priorities_under_pressure()),
        (
            "--enable-priority-scheduling",
            "--disable-priority-preemption",
            "--schedule-conservativeness",
            "0.02",
            "--retraction-policy",
            "priority",
        ),
        _FEW_STEPS,
        max_total_tokens=280,
        max_running_requests=8,
    ),
    TraceCase(
        "long_queue",
        "lpm with a queue above 128",
        (long_queue(),),
        ("--schedule-policy", "lpm"),
        max_total_tokens=800,
        max_running_requests=8,
        chunked_prefill_size=256,
    ),
    TraceCase(
        "pauses",
        "pauses with retract in a pool under pressure: what they evict",
        (pauses("retract"), aborts_while_paused()),
        ("--schedule-conservativeness", "0.02"),
        _FEW_STEPS,
        max_total_tokens=340,
        max_running_requests=5,
        chunked_prefill_size=64,
    ),
    _plain("fcfs", "defaults, a pool under pressure", 1, "--schedule-conservativeness", "0.2", max_total_tokens=1200),
    _plain(
        "retract",
        "retractions, chunks of 64",
        2,
        "--schedule-conservativeness",
        "0.02",
        max_total_tokens=700,
        max_running_requests=12,
        chunked_prefill_size=64,
        env=_FEW_STEPS,
    ),
    _plain(
        "page16",
        "pages of 16 tokens, chunks of 64",
        3,
        "--page-size",
        "16",
        "--schedule-conservativeness",
        "0.02",
        max_total_tokens=1024,
        chunked_prefill_size=64,
    ),
    _plain("lpm", "longest prefix first", 4, "--schedule-policy", "lpm", max_running_requests=4),
    _plain("no_overlap", "no overlap", 5, "--disable-overlap-schedule", max_total_tokens=1200, max_running_requests=8),
    _plain(
        "no_chunks", "chunking off", 6, "--max-prefill-tokens", "256", max_total_tokens=2000, chunked_prefill_size=-1
    ),
    TraceCase(
        "ignore_eos",
        "fixed lengths, charged in full",
        (conversations(7, 24, ignore_eos=True),),
        max_total_tokens=900,
    ),
)
