"""Measured serving points: closed loops with closed forms, vLLM's rules, the bundled data, the errors' headline."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.costs import cost_model
from sim.costs.linear import LinearCostModel
from sim.costs.overheads import NONE, Overheads, fitted
from sim.costs.tables import StepTable
from sim.engine import EngineModelOptions
from sim.serving.closed_loop import lengths, sglang_loop, vllm_loop
from sim.serving.costs import StepCosts
from sim.serving.fit import fit
from sim.serving.points import answer, has_table, kv_tokens
from sim.serving.tables import tables
from sim.serving.vllm_engine import Prompt, VllmEngine, VllmOptions
from testbed.commands.serving_errors import compare, contradicted, headlines, spread
from testbed.commands.serving_points import Point, cases, points
from testbed.scenario.catalogue import gpu_spec, model_preset
from testbed.scenario.run import LinearCosts
from tests.cli.conftest import Cli, cli, read_json
from tests.support.scenarios import scenario

__all__ = ["cli"]

BASE, EACH, KV, PROMPT_BASE, PROMPT = 0.01, 1e-4, 1e-7, 0.005, 2e-5
"""Seconds: a decode step, each sequence, each token of context; a step with prompts, each of their tokens."""


def costs(overheads: Overheads = NONE, collectives: int = 0) -> StepCosts:
    """A table that is linear, so that interpolation is exact: decode = BASE + EACH n + KV S, prompts = PROMPT_BASE +
    PROMPT tokens."""
    decode = {(c, n): BASE + EACH * n + KV * n * c for c in (1, 1000, 100_000) for n in (1, 10, 1000)}
    prompts = {(b, s): PROMPT_BASE + PROMPT * b * s for b in (1, 4) for s in (16, 8192, 32_768)}
    prompts |= {(4, s // 4): PROMPT_BASE + PROMPT * s for s in (8192, 32_768)}
    return StepCosts(StepTable(None, decode, prompts), overheads, collectives)


def decode_s(n: int, context: float) -> float:
    return BASE + EACH * n + KV * context


# --- closed forms -----------------------------------------------------------------------------------------------------


def test_a_closed_loop_of_one_client_before_vllm() -> None:
    """TTFT = the prompt's step; the i-th decode step has context isl + i: TPOT = decode(1, isl + osl / 2)."""
    isl, osl = 500, 101
    found = vllm_loop(VllmOptions(10_000, 8), costs(), [(isl, osl)] * 5, 1)
    assert found.ttft_s == pytest.approx(PROMPT_BASE + PROMPT * isl)
    assert found.tpot_s == pytest.approx(decode_s(1, isl + (osl - 1 + 1) / 2), rel=1e-12)
    assert found.requests_per_s == pytest.approx(1 / (found.ttft_s + (osl - 1) * found.tpot_s))


def test_a_closed_loop_of_equal_requests_before_vllm_stays_one_wave() -> None:
    """Four prompts fit into one step, so all clients go in step: TPOT = decode(4, 4 (isl + osl / 2))."""
    isl, osl, n = 100, 51, 4
    found = vllm_loop(VllmOptions(10_000, 8), costs(), [(isl, osl)] * 12, n)
    assert found.ttft_s == pytest.approx(PROMPT_BASE + PROMPT * isl * n)
    assert found.tpot_s == pytest.approx(decode_s(n, n * (isl + osl / 2)), rel=1e-12)


def test_a_closed_loop_before_sglang_with_linear_steps() -> None:
    """Prompts that take no time of their own: n clients decode together, TPOT = base + per_sequence n + context."""
    model = LinearCostModel(LinearCosts(base_s=BASE, per_sequence_s=EACH, per_context_token_s=0.0))
    options = EngineModelOptions(max_total_num_tokens=100_000, disable_radix_cache=True)
    for n in (1, 7, 64):
        assert sglang_loop(options, model, [(200, 50)] * n * 5, n).tpot_s == pytest.approx(BASE + EACH * n, rel=0.03)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.sampled_from([0.0, 0.004]), st.booleans(), st.integers(0, 99))
def test_littles_law_holds_in_every_closed_loop(n: int, away: float, ahead: bool, seed: int) -> None:
    """Clients = throughput x (time in the server + time away), but for the last requests, when some have left."""
    asked = lengths(400, 300, 40, 0.5, seed)
    options = VllmOptions(100_000, 64, 512, ahead)
    found = vllm_loop(options, costs(), asked, n, away)
    out = sum(reply for _, reply in asked) / len(asked)
    inside = found.ttft_s + found.tpot_s * (out - 1)
    assert found.requests_per_s * (inside + away) == pytest.approx(n, rel=0.08)


# --- vLLM's rules -----------------------------------------------------------------------------------------------------


def run(engine: VllmEngine, requests: list[tuple[float, Prompt]]) -> dict[int, tuple[float, float]]:
    """(first token, end) of each request."""
    ended, left = {}, sorted(requests, key=lambda x: x[0])
    while left or engine.wake_at < float("inf"):
        now = min(engine.wake_at, left[0][0] if left else float("inf"))
        while left and left[0][0] <= now:
            engine.submit(now, left.pop(0)[1])
        for r in engine.advance(now):
            ended[r.rid] = (r.first_t, now)
    return ended


def test_a_prompt_longer_than_the_budget_takes_several_steps_and_replies_go_on_in_them() -> None:
    """2,500 tokens with a budget of 1,000 beside one decoding request: 999 + 999 + 502, and a token in each step."""
    engine = VllmEngine(VllmOptions(10_000, 8, 1000, False), costs())
    found = run(engine, [(0.0, Prompt(0, 16, 100)), (0.001, Prompt(1, 2500, 1))])
    first = PROMPT_BASE + PROMPT * 16
    mixed = sum(PROMPT_BASE + PROMPT * (new + 1) + KV * 17 for new in (999, 999, 502))  # contexts 17, 18, 19
    assert found[1][0] == pytest.approx(first + mixed, rel=1e-4)
    assert found[0][1] == pytest.approx(first + mixed + 96 * decode_s(1, 68), rel=1e-3)


def test_a_mixed_step_reads_the_weights_once() -> None:
    """Between the longer of the two steps and their sum; the sequences' KV comes on top of the prompts' step."""
    c = costs()
    mixed = c.step_time(1000, 5e5, 1, 8, 8 * 2000)
    assert mixed == pytest.approx(PROMPT_BASE + PROMPT * 1008 + KV * 8 * 1999)
    assert max(c.prefill_time(1000, 5e5, 1), c.decode_time(8, 16_000)) < mixed
    assert mixed < c.prefill_time(1000, 5e5, 1) + c.decode_time(8, 16_000)


def test_a_step_is_put_together_one_step_earlier_under_asynchronous_scheduling() -> None:
    """A request that comes during a decode step joins the next one, or the one after it."""
    at = {}
    for ahead in (False, True):
        engine = VllmEngine(VllmOptions(10_000, 8, 1000, ahead), costs())
        at[ahead] = run(engine, [(0.0, Prompt(0, 10, 100)), (0.02, Prompt(1, 100, 1))])[1][0]
    assert at[True] - at[False] == pytest.approx(decode_s(1, 13), rel=1e-3)


class OneByOne(VllmEngine):
    """The reference: every decode step is planned by itself."""

    def _plan(self) -> None:
        super()._plan()
        if self._steps > 1:
            self._steps = 1
            self.wake_at = self._t + self.costs.run_time(len(self._decoding), self._context + len(self._decoding), 1)


Requests = st.lists(st.tuples(st.floats(0, 2), st.integers(1, 900), st.integers(1, 90)), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(Requests, st.sampled_from([64, 1000]), st.sampled_from([1000, 2500, 100_000]), st.booleans(), st.integers(1, 6))
def test_runs_of_steps_are_the_same_steps(
    asked: list[tuple[float, int, int]], budget: int, pool: int, ahead: bool, rows: int
) -> None:
    """Also with preemptions (a pool of 1,000 tokens). Every request ends."""
    options = VllmOptions(pool, rows, budget, ahead)
    several, single = (
        run(kind(options, costs()), [(t, Prompt(i, p, o)) for i, (t, p, o) in enumerate(asked)])
        for kind in (VllmEngine, OneByOne)
    )
    assert len(several) == len(asked)
    for i, times in single.items():
        assert several[i] == pytest.approx(times, abs=1e-9)


def test_a_request_that_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="a pool of 100"):
        VllmEngine(VllmOptions(100, 8), costs()).submit(0.0, Prompt(0, 90, 20))


def test_overheads_are_added_once_a_step() -> None:
    more = costs(Overheads(1e-3, 1e-5, 1e-6), 100)
    assert more.decode_time(8, 8000) - costs().decode_time(8, 8000) == pytest.approx(1e-3 + 8e-5 + 1e-4)
    plain, mixed = costs().step_time(500, 0.0, 1, 8, 8000), more.step_time(500, 0.0, 1, 8, 8000)
    assert mixed - plain == pytest.approx(1e-3 + 9e-5 + 1e-4)


def test_a_scenario_may_ask_for_the_overheads() -> None:
    """SGLang's, on top of every step of the bundled table: step + sequence n + all-reduce x 2 layers."""
    gpu, model = gpu_spec("H100"), model_preset("Qwen3-32B")
    asked = {"type": "measured", "overheads": True}
    with_them, without = (
        cost_model(scenario(simulation={"engine_costs": costs_}, placement__rollout_num_gpus_per_engine=4), model, gpu)
        for costs_ in (asked, {"type": "measured"})
    )
    f = fitted()["sglang"]
    more = (f.step_us + 32 * f.sequence_us + 128 * f.collective_us) * 1e-6
    assert with_them.decode_time(32, 32_000) - without.decode_time(32, 32_000) == pytest.approx(more)


# --- data -------------------------------------------------------------------------------------------------------------


def test_the_bundled_points_are_those_of_the_source() -> None:
    rows = points()
    assert len(rows) == 657
    assert sum(p.mode == "agg" for p in rows) == 604
    p = next(p for p in rows if p.id == "dsr1_h200_sglang_fp8_agg_1024x1024_c4_cfg81")
    assert (p.ttft_ms, p.tpot_ms, p.tp_size, p.concurrency, p.gpu) == (259.911, 10.2923, 8, 4, "H200")


def test_every_point_is_a_case_or_left_out_with_a_reason() -> None:
    found, left_out = cases(points())
    assert len(found) + len(left_out) == 657
    assert all(x.reason for x in left_out)
    assert sum("PD" in x.reason for x in left_out) == 53 == sum(p.mode == "disagg" for p in points())
    assert sum(has_table(c) for c in found) == 424
    assert all(kv_tokens(c) > c.point.isl + c.point.osl for c in found)


def test_tables_for_the_same_engine_are_those_of_the_bundled_grid() -> None:
    """Two files, one source: Qwen3-32B in bf16 with TP 4 on H100 before SGLang."""
    from sim.costs.tables import step_tables

    kind = next(k for k in tables() if (k.model, k.backend) == ("Qwen/Qwen3-32B", "sglang"))
    assert tables()[kind].decode == step_tables()["H100", "Qwen3-32B", 4].decode


def test_measurements_that_others_contradict() -> None:
    found = contradicted(c.point for c in cases(points())[0])
    assert sum("c512" in id_ and "gpt_oss" in id_ for id_ in found) == 3
    assert len(found) == 4


def test_spread_of_errors() -> None:
    s = spread([-0.2, 0.0, 0.1, 0.3])
    assert (s.points, s.mean, s.median) == (4, pytest.approx(0.15), pytest.approx(0.15))
    assert s.p50 == pytest.approx(0.05)


# --- headline ---------------------------------------------------------------------------------------------------------


def subset(name: str, system: str, clients: set[int]) -> list[Point]:
    return [p for p in points() if (p.model, p.system) == (name, system) and p.concurrency in clients]


@pytest.mark.parametrize(
    ("name", "system", "clients", "bound"),
    [
        ("Qwen3-32B", "h100_sxm", {16}, 0.06),  # fitted to
        ("Llama-3.1-70B", "h100_sxm", {4, 16, 64}, 0.08),  # predicted, another GPU
        ("gpt-oss-120b", "h200_sxm", {8, 32}, 0.12),  # predicted, another architecture
        ("Llama-3.1-8B-Instruct", "h200_sxm", {128, 64, 240}, 0.15),  # predicted, another engine
    ],
)
def test_tpot_of_a_small_part_is_near_the_measured(name: str, system: str, clients: set[int], bound: float) -> None:
    found = [c for c in cases(subset(name, system, clients))[0] if has_table(c)]
    assert len(found) >= 6
    [head] = [g for g in headlines(compare(found, [answer(c) for c in found])) if g.name == "all"]
    assert head.tpot.mean < bound


def test_the_fit_finds_what_was_put_in(tmp_path: Path) -> None:
    """Points whose TPOT is a simulation with known overheads give these overheads back."""
    import msgspec

    from sim.serving.points import simulate

    true = Overheads(8e-4, 2e-5, 6e-6)
    made = []
    for c in cases(subset("Qwen3-32B", "h100_sxm", {8, 16, 64}))[0]:
        if c.point.backend == "vllm" and c.point.isl == 1024:
            tpot_ms = simulate(c, true).tpot_s * 1e3
            made.append(msgspec.structs.replace(c, point=msgspec.structs.replace(c.point, tpot_ms=tpot_ms)))
    [found] = fit(made, tmp_path / "overheads.json", lambda: None).values()
    assert found.overheads().sequence_s == pytest.approx(true.sequence_s, rel=0.15)
    assert found.step_us + 128 * found.collective_us == pytest.approx(800 + 128 * 6, rel=0.05)


def test_the_overheads_are_of_the_stated_part() -> None:
    found = [c.point for c in cases(points())[0] if c.point.fitted]
    assert sum(f.points for f in fitted().values()) == len(found) == 147
    assert {p.model for p in found} == {"Qwen3-32B", "Llama-3.1-70B"}


# --- command ----------------------------------------------------------------------------------------------------------


def test_the_command_writes_figures_and_a_page(cli: Cli, tmp_path: Path) -> None:
    said = cli(
        "serving-points", "--only", "llama_3_1_70b", "--only", "H100", "--only", "c4_tp4", "--jobs", "1",
        "--json", "f.json", "--out", "page.md", "--max-error", "10",
    )  # fmt: skip
    assert said.code == 0, said.err
    figures = read_json(tmp_path / "f.json")
    assert len(figures["points"]) == 3
    assert {p["isl"] for p in figures["points"]} == {1024, 8192}
    page = (tmp_path / "page.md").read_text()
    assert "Llama-3.1-70B, vllm" in page
    assert "--only llama_3_1_70b" in page


def test_the_command_fails_above_the_bound(cli: Cli) -> None:
    said = cli("serving-points", "--only", "llama_3_1_70b", "--only", "H100", "--only", "c4_tp4", "--max-error", "0.1")
    assert said.code == 1
    assert "above --max-error 0.1" in said.err


@pytest.mark.parametrize(
    ("only", "message"),
    [("Qwen3-33B", "nearest: --only Qwen3-32B"), ("disagg", "pending: prefill and decode on engines of their own")],
)
def test_the_command_refuses_what_there_is_not(cli: Cli, only: str, message: str) -> None:
    said = cli("serving-points", "--only", only)
    assert said.code == 2
    assert message in said.err
    assert len(said.err.strip().splitlines()) <= 3
