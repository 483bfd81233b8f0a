"""The client against a real engine: log-probabilities and experts against a transformers forward, versions, caches,
pauses, refusals, and one generation per id."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from real.engines.client import EngineClient
from real.errors import EngineGone, EngineRefused

PROMPT = list(range(2, 30))
Run = Callable[[Coroutine[Any, Any, Any]], Any]


def greedy(
    client: EngineClient, rid: str, tokens: int, prompt: list[int] = PROMPT, **options: Any
) -> asyncio.Task[Any]:
    """A request under way: `tokens` greedy tokens, whatever they are."""
    options = {"temperature": 0.0, "ignore_eos": True} | options
    return asyncio.create_task(client.generate(rid=rid, input_ids=prompt, max_new_tokens=tokens, **options))


async def until_running(client: EngineClient, n: int) -> None:
    """Each look is a round trip to the engine, which waits for nothing else."""
    async with asyncio.timeout(60):
        while (await client.loads()).running < n:
            pass


async def until_flushed(client: EngineClient) -> None:
    """A batch outlives its last answer by a step, and a flush is refused for as long."""
    async with asyncio.timeout(60):
        while not await client.flush():
            pass


@pytest.fixture(autouse=True)
def as_it_was(client: EngineClient, run: Run) -> Any:
    """Every test finds the engine idle, flushed and at version 0, and leaves it so."""
    yield

    async def restore() -> None:
        await client.resume()
        await client.abort_all()
        await client.set_weight_version("0")
        await until_flushed(client)

    run(restore())


def test_log_probs_are_those_of_the_sampling_distribution(client: EngineClient, run: Run, forward: Any) -> None:
    """Greedy and sampled requests in one batch, each against transformers at its own temperature."""
    temperatures = [0.0, 0.6, 1.0, 1.7]

    async def scenario() -> list[Any]:
        calls = (
            client.generate(rid=f"t{t}", input_ids=PROMPT, max_new_tokens=24, temperature=t, ignore_eos=True)
            for t in temperatures
        )
        return await asyncio.gather(*calls)

    for temperature, got in zip(temperatures, run(scenario()), strict=True):
        log_probs, _ = forward(PROMPT + got.output_ids, temperature or 1.0)
        where = np.arange(len(PROMPT) - 1, len(PROMPT) + 23)
        assert np.abs(log_probs[where, got.output_ids] - got.log_probs).max() < 1e-4
        if temperature == 0.0:
            assert (log_probs[where].argmax(axis=-1) == got.output_ids).all()
        assert got.prompt_tokens == len(PROMPT)


def test_er_03_and_er_17_routed_experts_have_one_entry_for_each_predicted_position(
    client: EngineClient, run: Run, forward: Any
) -> None:
    async def scenario() -> Any:
        await client.generate(rid="warm", input_ids=PROMPT, max_new_tokens=1)  # the prefix then comes from the cache
        return await greedy(client, "experts", 20, return_routed_experts=True)

    got = run(scenario())
    positions, layers, top_k = len(PROMPT) + 20 - 1, 2, 2
    assert got.cached_tokens > 0
    assert got.routed_experts.shape == (positions, layers, top_k)
    assert got.routed_experts.nbytes == positions * layers * top_k * 4
    _, experts = forward(PROMPT + got.output_ids)
    assert (np.sort(got.routed_experts, axis=-1) == experts[:-1]).all()


def test_er_12_the_finish_reason_says_how_a_request_ended(client: EngineClient, run: Run) -> None:
    async def scenario() -> tuple[Any, Any, Any]:
        full = await greedy(client, "length", 12)
        stop = full.output_ids[7]
        stopped = await greedy(client, "stop", 12, stop_token_ids=[stop], ignore_eos=False)
        long = greedy(client, "abort", 1500)
        await until_running(client, 1)
        await client.abort("abort")
        return full, stopped, await long

    full, stopped, aborted = run(scenario())
    end = full.output_ids.index(full.output_ids[7]) + 1
    assert (full.finish_reason, len(full.output_ids)) == ("length", 12)
    assert (stopped.finish_reason, stopped.output_ids) == ("stop", full.output_ids[:end])
    assert aborted.finish_reason == "abort"
    assert 0 < len(aborted.output_ids) < 1500
    assert aborted.spans == (("0", 0, len(aborted.output_ids)),)


def test_rk_12_the_next_turn_finds_the_whole_conversation_in_the_cache(client: EngineClient, run: Run) -> None:
    async def scenario() -> tuple[Any, ...]:
        first = await greedy(client, "turn1", 10)
        prompt = PROMPT + first.output_ids + [60, 61, 62, 63]  # an observation
        second = await greedy(client, "turn2", 4, prompt)
        salted = await greedy(client, "turn2-salted", 4, prompt, extra_key="v1")
        again = await greedy(client, "turn2-again", 4, prompt, extra_key="v1")
        await until_flushed(client)
        return first, second, salted, again, await greedy(client, "turn2-flushed", 4, prompt)

    first, second, salted, again, cold = run(scenario())
    assert first.cached_tokens == 0
    assert second.cached_tokens == len(PROMPT) + 10 - 1  # the last sampled token has no KV yet
    assert salted.cached_tokens == 0  # no request reuses KV made under another key
    assert again.cached_tokens == len(PROMPT) + 14 - 1  # all but the token that must be computed for its logits
    assert cold.cached_tokens == 0
    assert second.output_ids == salted.output_ids == cold.output_ids


def test_an_id_is_generated_once_while_it_is_open(client: EngineClient, engine: Any, run: Run) -> None:
    async def scenario() -> None:
        other = EngineClient(engine.url)
        first = greedy(client, "same", 200)
        second = greedy(client, "same", 200)
        await until_running(client, 1)
        first.cancel()  # its caller gave up; the generation goes on for the second
        third = greedy(client, "same", 200)
        with pytest.raises(EngineRefused, match="Duplicate request ID"):
            await greedy(other, "same", 200)
        assert (await client.loads()).running == 1
        one, two = await asyncio.gather(second, third)
        assert one is two
        assert len(one.output_ids) == 200
        assert (await greedy(client, "same", 3)).output_ids == one.output_ids[:3]  # ended: the id is free again
        await other.close()

    run(scenario())


def test_a_lost_request_may_be_sent_again_under_its_id(client: EngineClient, engine: Any, run: Run) -> None:
    async def scenario() -> None:
        hasty = EngineClient(engine.url, timeout_s=3.0)
        held = greedy(hasty, "lost", 1500)
        await until_running(client, 1)
        await client.pause("in_place")
        with pytest.raises(EngineGone, match="no answer within 3 s"):
            await held
        await client.resume()
        assert len((await greedy(hasty, "lost", 3)).output_ids) == 3
        await until_flushed(client)  # nothing of the first is left
        await hasty.close()

    run(scenario())


def test_a_paused_engine_leaves_the_cores_to_others(client: EngineClient, engine: Any, run: Run) -> None:
    """Of a second paused, with and without requests, its processes use less than half of a core; without the hook of
    the stand-in a paused scheduler spins on a whole one."""

    def used() -> float:
        server = psutil.Process(engine.pid)
        times = [p.cpu_times() for p in (server, *server.children(recursive=True))]
        return sum(t.user + t.system for t in times)

    async def scenario() -> None:
        for requests in (0, 1):
            held = [greedy(client, f"held-{i}", 400) for i in range(requests)]
            await until_running(client, requests)
            await client.pause("in_place")
            before = used()
            await asyncio.sleep(1.0)
            spent = used() - before
            await client.resume()
            assert [len((await h).output_ids) for h in held] == [400] * requests
            assert spent < 0.5

    run(scenario())


def test_abort_ends_one_request_and_not_those_whose_id_begins_with_its_id(client: EngineClient, run: Run) -> None:
    async def scenario() -> None:
        one, ten = greedy(client, "1-1", 1500), greedy(client, "1-10", 150)
        await until_running(client, 2)
        await client.abort("1-1")
        assert (await one).finish_reason == "abort"
        assert (await ten).finish_reason == "length"
        with pytest.raises(ValueError, match="contains"):
            await greedy(client, "1;1", 1)

    run(scenario())


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_as_09_requests_in_flight_go_on_are_recomputed_or_end_as_the_pause_mode_says(
    client: EngineClient, run: Run, mode: Any
) -> None:
    async def scenario() -> None:
        whole = await greedy(client, "whole", 900)
        requests = [greedy(client, f"{mode}-{i}", 900) for i in range(2)]
        await until_running(client, 2)
        await client.pause(mode)
        late = greedy(client, "late", 2)
        assert await client.flush() == (mode != "in_place")  # in_place holds KV: a flush is refused
        assert await client.health()
        assert [request.done() for request in requests] == [mode == "abort"] * 2
        assert not late.done()
        await client.resume()
        for got in await asyncio.gather(*requests):
            assert got.output_ids == whole.output_ids[: len(got.output_ids)]
            assert (got.finish_reason == "abort") == (mode == "abort")
            assert (len(got.output_ids) == 900) == (mode != "abort")
            assert got.retractions == (mode == "retract")
        assert (await late).output_ids == whole.output_ids[:2]

    run(scenario())


def test_er_08_version_spans_partition_a_request_that_an_update_interrupted(client: EngineClient, run: Run) -> None:
    async def scenario() -> Any:
        request = greedy(client, "spans", 900)
        await until_running(client, 1)
        for version in ("4", "7"):
            await client.pause("in_place")
            await client.set_weight_version(version)
            assert await client.weight_version() == version
            await client.resume()
        return await request

    spans = run(scenario()).spans
    assert [version for version, _, _ in spans][:1] == ["0"]
    assert [version for version, _, _ in spans][-1:] == ["7"]
    assert [start for _, start, _ in spans] == [0] + [end for _, _, end in spans[:-1]]
    assert spans[-1][2] == 900
    assert all(start < end for _, start, end in spans)


def test_ws_08_an_update_whose_flush_is_refused_says_so_and_keeps_the_new_version(
    client: EngineClient, run: Run, moe_model: Path, tmp_path: Path
) -> None:
    """Weights from disk while a request is held in place: written and named, KV of the old ones still there."""
    folder = shutil.copytree(moe_model, tmp_path / "v3")

    async def scenario() -> None:
        request = greedy(client, "held", 900)
        await until_running(client, 1)
        await client.pause("in_place")
        with pytest.raises(EngineRefused, match="cache still holds KV"):
            await client.update_from_disk(folder, weight_version="3", flush_cache=True)
        assert await client.weight_version() == "3"
        await client.resume()
        assert [version for version, _, _ in (await request).spans] == ["0", "3"]
        await client.update_from_disk(folder, weight_version="4", flush_cache=True)
        assert await client.weight_version() == "4"
        with pytest.raises(EngineRefused):
            await client.update_from_disk(tmp_path / "nothing", weight_version="5", flush_cache=False)
        assert await client.weight_version() == "4"

    run(scenario())


def test_updates_need_a_session_and_there_is_one_at_a_time(client: EngineClient, run: Run) -> None:
    async def scenario() -> None:
        with pytest.raises(EngineRefused, match="begin_weight_update"):
            await client.update_from_tensor(["AAAA"], load_format=None, weight_version="1", flush_cache=False)
        await client.begin_update()
        with pytest.raises(EngineRefused, match="already open"):
            await client.begin_update()
        await client.end_update()
        with pytest.raises(EngineRefused, match="no weight-update session"):
            await client.end_update()
        assert await client.weight_version() == "0"

    run(scenario())


def test_loads_report_what_runs_and_add_up_its_time(client: EngineClient, run: Run) -> None:
    async def scenario() -> None:
        before = await client.loads()
        assert (before.running, before.waiting, before.kv_used_tokens) == (0, 0, 0)
        assert before.kv_total_tokens == 8192
        sent = time.monotonic()
        requests = [greedy(client, f"load{i}", 400, [40 + i] * 700) for i in range(18)]
        await until_running(client, 7)  # 700 + 400 tokens each: the pool of 8192 holds seven at most to their end
        during = await client.loads()
        assert during.running + during.waiting == 18
        assert during.waiting >= 2  # 16 may run
        assert 7 * 700 <= during.kv_used_tokens <= 8192
        await client.abort_all()
        await asyncio.gather(*requests)
        after = await client.loads()
        busy = (after.prefill_s - before.prefill_s) + (after.decode_s - before.decode_s)
        assert after.prefill_s - before.prefill_s > 0
        assert busy <= time.monotonic() - sent

    run(scenario())


def test_memory_is_released_and_resumed_when_idle_and_refused_while_requests_run(
    client: EngineClient, engine: Any, run: Run
) -> None:
    async def scenario() -> None:
        whole = await greedy(client, "whole", 200)
        request = greedy(client, "running", 200)
        await until_running(client, 1)
        with pytest.raises(EngineRefused, match="pause with retract"):
            await client.release_memory()
        await client.pause("retract")
        await client.release_memory(["kv_cache"])
        await client.resume_memory(["kv_cache"])
        await client.resume()
        assert (await request).output_ids == whole.output_ids
        await client.release_memory()
        await client.resume_memory()
        assert (await greedy(client, "after", 50)).output_ids == whole.output_ids[:50]

    run(scenario())
    assert engine.alive


def test_times_are_of_this_machines_monotonic_clock(client: EngineClient, run: Run) -> None:
    async def scenario() -> None:
        sent = time.monotonic()
        got = await greedy(client, "times", 30)
        assert got.started_t is not None
        assert got.first_token_t is not None
        assert sent <= got.started_t <= got.first_token_t <= time.monotonic()

    run(scenario())


def test_no_engine_is_gone_and_a_bad_request_is_refused(client: EngineClient, run: Run) -> None:
    async def scenario() -> None:
        nobody = EngineClient("http://127.0.0.1:1")
        assert not await nobody.health()
        with pytest.raises(EngineGone, match=r"127\.0\.0\.1:1"):
            await nobody.weight_version()
        await nobody.close()
        with pytest.raises(EngineRefused, match="longer than the model's context length"):
            await greedy(client, "too-long", 2, PROMPT * 100)

    run(scenario())
