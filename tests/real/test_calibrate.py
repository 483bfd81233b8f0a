"""How the experiments of a calibration drive an engine: with a stand-in that counts what it is asked."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from real.calibration.beside import IN_A_ROW, measure_beside, measure_crowd
from real.calibration.engine import _batches, measure, measure_controls, measure_traffic
from real.calibration.updates import measure_updates
from real.engines.answers import Generated
from testbed.calibration.design import OUTPUTS, Beside, Control, Experiment, Traffic, UpdateSize, controls

STEP_S, PREFILL_S = 0.01, 0.5


class Engine:
    """Takes what is there when it is resumed as one batch; remembers prompts until it is flushed."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.cache: set[tuple[int, ...]] = set()
        self.paused = False
        self.resumed = asyncio.Event()
        self.prefill_us = 0
        self.moments = [0.0, 0.0, 0.0]

    async def flush(self) -> bool:
        self.calls.append("flush")
        self.cache.clear()
        return True

    async def pause(self, mode: str) -> None:
        self.calls.append(f"pause {mode}")
        self.paused = True
        self.resumed.clear()

    async def resume(self) -> None:
        self.calls.append("resume")
        self.paused = False
        self.prefill_us += int(PREFILL_S * 1e6)
        self.moments[0] += OUTPUTS - 2
        self.moments[2] += (OUTPUTS - 2) * STEP_S * 1e6
        self.resumed.set()

    async def abort_all(self) -> None:
        self.calls.append("abort_all")

    async def get(self, path: str) -> Any:
        assert path == "/v1/loads?include=core"
        moments = list(self.moments) if self.moments[0] else None
        return {"loads": [{"total_prefill_busy_us": self.prefill_us, "decode_moments": moments}]}

    async def generate(self, *, rid: str, input_ids: list[int], max_new_tokens: int, ignore_eos: bool) -> Generated:
        assert ignore_eos
        self.calls.append(f"generate {len(input_ids)} {max_new_tokens}")
        if self.paused:
            await self.resumed.wait()
        key = tuple(input_ids)
        cached = len(key) - 1 if key in self.cache else 0
        self.cache.add(key)
        return Generated([1] * max_new_tokens, [], (), cached, len(key), "length", None, None, None, 0)


def test_each_experiment_is_one_batch_and_says_what_the_engine_counted() -> None:
    async def go() -> tuple[Engine, Any]:
        engine = Engine()
        experiments = [Experiment(2, 32), Experiment(2, 32, cached=31), Experiment(4, 8, held=False)]
        return engine, await measure([engine], experiments, 100, lambda e: None)  # type: ignore[list-item]

    engine, points = asyncio.run(go())
    cold, warm, burst = points
    for p, new, pairs in ((cold, 64, 2 * 32 * 16), (warm, 2, 2 * (31 + 0.5))):
        [batch] = p.batches
        assert (batch.requests, batch.new_tokens, batch.pairs, batch.padded_pairs) == (2, new, pairs, 2 * 32**2)
        assert batch.seconds == pytest.approx(PREFILL_S)
    for p in (cold, warm):
        assert p.prefill_s == pytest.approx(PREFILL_S)
        assert p.decode_s / p.decode_steps == pytest.approx(STEP_S)
        assert p.context == 2 * (32 + 1 + (OUTPUTS - 1) / 2)
    assert (burst.requests, burst.held, burst.prefill_s) == (4, False, 0.0)
    assert engine.calls == [
        *("flush", "pause in_place", *[f"generate 32 {OUTPUTS}"] * 2, "resume"),
        *("pause in_place", *[f"generate 32 {OUTPUTS}"] * 2, "resume"),  # the same prompts: in the cache
        *("flush", *["generate 8 1"] * 4, "flush"),
    ]


def answer(started_t: float, cached: int = 0) -> Generated:
    return Generated([1], [], (), cached, 32, "length", None, started_t, None, 0)


def test_requests_that_a_resumed_engine_takes_one_by_one_are_batches_of_their_own() -> None:
    """The first begins at 5 s, three more 20 ms later; all results are looked at 100 ms after the first began."""
    answers = [answer(5.0202), answer(5.0), answer(5.0201, 31), answer(5.02)]
    first, rest = _batches(32, answers, 0.1)
    assert (first.requests, first.new_tokens, first.seconds) == (1, 32, pytest.approx(0.02))
    assert (rest.requests, rest.new_tokens, rest.seconds) == (3, 65, pytest.approx(0.08))
    assert rest.pairs == 2 * 32 * 16 + 31.5


def test_controls_pause_in_every_mode_and_flush_an_idle_engine() -> None:
    async def go() -> tuple[Engine, Any]:
        engine = Engine()
        return engine, await measure_controls(engine, controls(2, 100, 64, 1), 100, lambda c: None)  # type: ignore[arg-type]

    engine, points = asyncio.run(go())
    assert [(p.mode, p.running) for p in points] == [(m, n) for m in ("abort", "retract", "in_place") for n in (0, 2)]
    assert engine.calls[:4] == ["pause abort", "flush", "resume", "abort_all"]
    assert engine.calls[4:9] == ["generate 8 32", "generate 8 32", "pause abort", "resume", "abort_all"]
    assert all((p.flush_s == 0.0) is (p.running > 0) for p in points)


def test_a_crowd_is_measured_on_all_engines_at_once_and_on_each_alone() -> None:
    """An engine's step takes half as long again while another one is at it too."""
    at_once = 0

    class Crowded(Engine):
        async def resume(self) -> None:
            nonlocal at_once
            at_once += 1
            await asyncio.sleep(0.01)
            share = 1.5 if at_once > 1 else 1.0
            await asyncio.sleep(0.01)
            at_once -= 1
            before = self.moments[2], self.prefill_us
            await super().resume()
            self.moments[2] = before[0] + share * (self.moments[2] - before[0])
            self.prefill_us = before[1] + int(share * (self.prefill_us - before[1]))

    async def go() -> Any:
        engines, done = [Crowded(), Crowded()], []
        points = await measure_crowd(engines, [Experiment(1, 8), Experiment(2, 16)], 100, done.append)  # type: ignore
        assert len(done) == 2 and [e.calls[-1] for e in engines] == ["flush", "flush"]
        return points

    points = asyncio.run(go())
    assert [p.requests for p in points] == [1, 1, 2, 2]  # a point for each engine
    for p in points:
        assert (p.decode_alone_s, p.decode_together_s) == pytest.approx((STEP_S, 1.5 * STEP_S))
        assert (p.prefill_alone_s, p.prefill_together_s) == pytest.approx((PREFILL_S, 1.5 * PREFILL_S), rel=1e-3)


def test_a_closed_loop_sends_the_next_request_when_one_has_ended() -> None:
    """Two clients, five requests: never more than two at once, each asked once, on both engines."""
    open_now: list[int] = []

    class Slow(Engine):
        at_once = 0

        async def generate(self, *, rid: str, input_ids: list[int], max_new_tokens: int, ignore_eos: bool) -> Generated:
            self.at_once += 1
            open_now.append(self.at_once)
            await asyncio.sleep(0.002 * max_new_tokens)
            self.at_once -= 1
            return await super().generate(
                rid=rid, input_ids=input_ids, max_new_tokens=max_new_tokens, ignore_eos=ignore_eos
            )

    loop = Traffic(2, ((4, 1), (5, 9), (6, 2), (7, 1), (8, 2)))

    async def go() -> tuple[list[Slow], Any]:
        engines = [Slow(), Slow()]
        return engines, await measure_traffic(engines, loop, 100)  # type: ignore

    engines, points = asyncio.run(go())
    assert max(open_now) == 2
    for engine, point in zip(engines, points, strict=True):
        assert (engine.calls[0], engine.calls[-1]) == ("flush", "flush")
        assert sorted(engine.calls[1:-1]) == [
            "generate 4 1",
            "generate 5 9",
            "generate 6 2",
            "generate 7 1",
            "generate 8 2",
        ]
        assert point.seconds >= 0.018


class Trainer:
    """Counts its updates, and notes them among the engine's calls."""

    world = 1

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.updates = 0
        self.records: list[Any] = []

    def with_signals(self, signals: Any) -> Trainer:
        return self

    async def train_update(self, records: Any, batch: int, update: int, updates: int) -> None:
        self.updates += 1
        self.records = list(records)
        self.engine.calls.append("update")
        await asyncio.sleep(0.002)


def test_side_by_side_every_experiment_is_made_alone_and_beside_updates_and_updates_beside_requests() -> None:
    async def go() -> tuple[Engine, Any]:
        engine = Engine()
        plan = [Beside((Experiment(2, 32),), Control("abort", 3, 20))]
        return engine, await measure_beside([engine], Trainer(engine), plan, 100, lambda what: None)  # type: ignore

    engine, points = asyncio.run(go())
    assert [p.what for p in points] == ["decode", "prefill", "train"]
    decode, prefill, train = points
    assert decode.alone_s == decode.beside_s == pytest.approx(STEP_S)
    assert prefill.alone_s == prefill.beside_s == pytest.approx(PREFILL_S)
    assert min(train.alone_s, train.beside_s) >= IN_A_ROW * 0.002
    calls = engine.calls
    assert calls[0] == "update"  # once for what happens at the first only
    alone, again = (i for i, c in enumerate(calls) if c == "flush" and "pause in_place" in calls[i : i + 3])
    assert "update" not in calls[alone : calls.index("resume", alone)]
    assert "update" in calls[again - 1 : calls.index("resume", again)]
    generating = [i for i, c in enumerate(calls) if c == "generate 8 20"]
    assert len(generating) >= 3 and calls[-2:] == ["abort_all", "flush"]
    between = calls[generating[0] : -2]
    assert between.count("update") >= IN_A_ROW


def test_updates_are_made_round_by_round_with_what_every_loss_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of two with different rewards, and log-probs of the old and of the reference policy. 8 x 40 tokens are one
    row of at most 512 tokens, 16 x 48 two of ten and six."""
    monkeypatch.setattr("real.calibration.updates.WAIT_S", 0.0)
    sizes = [UpdateSize(8, 40), UpdateSize(16, 48)] * 2

    async def go() -> tuple[Trainer, Any]:
        trainer = Trainer(Engine())
        return trainer, await measure_updates(trainer, sizes, 512, 100, lambda what: None)  # type: ignore

    trainer, points = asyncio.run(go())
    assert [p.rows for p in points] == [(320,), (480, 288)] * 2
    assert trainer.updates == 5 and all(p.seconds >= 0.002 for p in points)  # the first is not counted
    records = trainer.records
    assert [r.reward for r in records[:2]] == [0.0, 1.0] and records[0].group == records[1].group
    assert all(r.old_log_probs is not None and r.reference_log_probs is not None for r in records)
