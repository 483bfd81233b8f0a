"""How many requests a CPU-second one engine model simulates, and how many wake-ups a request costs.

Run: `python benchmarks/bench_engine.py [--requests N] [--mode skip|iterate]`. Single-turn requests with fresh 512-token
prompts in groups of 8 that share the prompt; `running` of them at once in a closed loop (a group starts when a group's
worth is free), so the pool stays full of finished replies and every new request evicts an old one.
"""

from __future__ import annotations

import argparse
import random
import time

from sim.costs.linear import LinearCostModel
from sim.engine import EngineModel, EngineModelOptions, Finished, Request
from testbed.scenario.run import LinearCosts

GROUP = 8
PROMPT = 512
REPLY = 4000


def costs() -> LinearCostModel:
    return LinearCostModel(
        LinearCosts(
            type="linear",
            base_s=5e-3,
            per_sequence_s=5e-5,
            per_context_token_s=2e-8,
            prefill_base_s=5e-3,
            prefill_per_token_s=2e-5,
        )
    )


def replies(kind: str, seed: int) -> list[int]:
    """Reply lengths to cycle through: all 4,000 tokens, or lognormal with sigma 1 and mean about 4,000."""
    if kind == "fixed":
        return [REPLY]
    rng = random.Random(seed)
    return [max(1, min(32768, int(rng.lognormvariate(7.794, 1.0)))) for _ in range(4096)]


def bench(requests: int, running: int, kind: str, mode: str, pool: int, max_new: int) -> tuple[float, float, int]:
    """(requests per CPU-second, wake-ups per request, iterations of the engine)."""
    engine = EngineModel(EngineModelOptions(max_total_num_tokens=pool, max_running_requests=running), costs(), mode)
    lengths = replies(kind, 1)
    cycle = len(lengths)
    made = done = free = wakes = 0
    now = 0.0

    def group(now: float) -> None:
        nonlocal made
        content = ((-1 - made, 0, PROMPT),)
        for _ in range(GROUP):
            n = lengths[made % cycle]
            engine.submit(
                now,
                Request(
                    rid=made,
                    content=content,
                    prompt_tokens=PROMPT,
                    output_tokens=n,
                    max_new_tokens=max_new if n < max_new else n,
                    stops=n < max_new,
                    output_content=made,
                ),
            )
            made += 1

    start = time.process_time()
    for _ in range(running // GROUP):
        group(now)
    while engine.wake_at != float("inf"):
        now = engine.wake_at
        wakes += 1
        for notice in engine.advance(now):
            if type(notice) is Finished:
                done += 1
                free += 1
                if free == GROUP:
                    free = 0
                    if made < requests:
                        group(now)
    seconds = time.process_time() - start
    assert done == made
    return done / seconds, wakes / done, engine.iterations


COLUMNS = (("replies", 14), ("running", 8), ("requests/CPU-s", 15), ("wake-ups/request", 17), ("iterations", 12))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--mode", default="skip", choices=["skip", "iterate"])
    args = parser.parse_args()
    print(" ".join(name.rjust(width) for name, width in COLUMNS))
    for kind, max_new in (("fixed", REPLY), ("fixed", 32768), ("lognormal", 32768)):
        for running in (16, 32, 64):
            pool = 400_000 if max_new == REPLY else 2_000_000
            rate, wakes, iterations = bench(args.requests, running, kind, args.mode, pool, max_new)
            how = kind + (", stop" if max_new > REPLY else ", length")
            print(f"{how:>18} {running:>4} {rate:>15,.0f} {wakes:>17.2f} {iterations:>12,}")


if __name__ == "__main__":
    main()
