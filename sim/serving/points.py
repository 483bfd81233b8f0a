"""One measured serving point, simulated: the engine kind's step table, the server's options, ten requests a client."""

from __future__ import annotations

from sim.costs.overheads import NONE, Overheads, collectives, fitted
from sim.engine import EngineModelOptions
from sim.serving.closed_loop import Latencies, lengths, sglang_loop, vllm_loop
from sim.serving.costs import StepCosts
from sim.serving.tables import tables
from sim.serving.vllm_engine import VllmOptions
from testbed.commands.serving_points import Answer, Case

REQUESTS_PER_CLIENT = 10
"""Published: the benchmark sends num-prompts = 10 x max-concurrency."""

MEMORY_BYTES = {"h100_sxm": 81_559 * 2**20, "h200_sxm": 143_771 * 2**20}
"""Published: what nvidia-smi says of one GPU."""

CLIENT_S = 1e-3
"""Assumed: from the end of a reply until the client's next request is tokenised and queued."""

VLLM_ACTIVATIONS = 0.05
"""Assumed: share of the memory that vLLM's largest step takes out of gpu-memory-utilization; SGLang's
mem_fraction_static leaves it outside."""


def scheduling(case: Case) -> str:
    """`sglang` (overlap), `vllm` (asynchronous) or `vllm_synchronous`: the host's share of a step differs."""
    return case.point.backend + ("" if case.launch.async_scheduling else "_synchronous")


def has_table(case: Case) -> bool:
    return case.kind in tables()


def simulate(case: Case, overheads: Overheads) -> Latencies:
    """Raises KeyError if there is no table of this engine kind."""
    p, launch = case.point, case.launch
    costs = StepCosts(tables()[case.kind], overheads, collectives(case.layers, p.tp_size))
    asked = lengths(REQUESTS_PER_CLIENT * p.concurrency, p.isl, p.osl, launch.shortest)
    pool = kv_tokens(case)
    if p.backend == "vllm":
        options = VllmOptions(pool, p.concurrency, launch.tokens_per_step, launch.async_scheduling)
        return vllm_loop(options, costs, asked, p.concurrency, CLIENT_S)
    sglang = EngineModelOptions(
        max_total_num_tokens=pool,
        max_running_requests=p.concurrency,
        chunked_prefill_size=launch.tokens_per_step,
        max_prefill_tokens=max(launch.tokens_per_step, 16_384),
        disable_radix_cache=True,
    )
    return sglang_loop(sglang, costs, asked, p.concurrency, CLIENT_S)


def kv_tokens(case: Case) -> int:
    """KV pool = (share x memory - weights / TP) / KV bytes per token, of one GPU."""
    p = case.point
    share = case.launch.memory_share - (VLLM_ACTIVATIONS if p.backend == "vllm" else 0.0)
    return int((share * MEMORY_BYTES[p.system] - case.weight_bytes / p.tp_size) // case.kv_bytes_per_token)


def answer(case: Case) -> Answer:
    """With the overheads of the bundled file, and for comparison with the tables alone."""
    whole = simulate(case, fitted()[scheduling(case)].overheads())
    bare = simulate(case, NONE)
    return Answer(case.point.id, whole.ttft_s * 1e3, whole.tpot_s * 1e3, bare.ttft_s * 1e3, bare.tpot_s * 1e3)
