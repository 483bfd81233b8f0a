"""Every weight path with every transition rule, for real: a request is in flight while two engines get new weights.

Expected log-probabilities come from a transformers forward with the trainer's weights before and after."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from real.records import Record
from real.weights.agree import Agreement
from real.weights.paths import weight_path
from tests.support.scenarios import scenario

PATHS = ("cuda_ipc", "broadcast", "p2p", "disk", "disk_delta")
RULES = [
    (request, kv)
    for request in ("finish", "retract", "in_place", "abort")
    for kv in ("flush", "salt_by_version", "keep")
    if (request, kv) != ("in_place", "flush")
]
TOLERANCE = 1e-4
STALE = 1e-3
"""Log-probabilities made over KV of other weights differ by more than this."""
LONG = (96, 288, 864)
"""Tokens of the request that is in flight; the more, where a busy machine lets a shorter one end too early."""


class Reference:
    """transformers, fp32, eager: log p of recorded tokens under some weights."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")

    def log_probs(self, weights: dict[str, Any], prompt: list[int], output: list[int]) -> np.ndarray:
        import torch

        self._model.load_state_dict(weights, strict=False)
        self._model.tie_weights()
        with torch.no_grad():
            logits = self._model(torch.tensor([prompt + output])).logits[0]
        rows = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
        return rows[torch.arange(len(output)), torch.tensor(output)].numpy()


class Publisher:
    """Publishes version after version over one path; `steps` makes the trainer's weights differ."""

    def __init__(self, rig: Any, name: str, folder: Path) -> None:
        self.rig = rig
        self.deployment = d = rig.deployment
        self.path = weight_path(name, d.trainer, folder=folder, timeout_s=60.0, bucket_bytes=2**20, device="cpu")
        self.agreement = Agreement(d.trainer, folder=folder, timeout_s=60.0)
        self.version = 0
        self._random = np.random.default_rng(0)

    def prompt(self) -> list[int]:
        return self._random.integers(4, 120, 48).tolist()

    async def weights(self) -> dict[str, Any]:
        return (await self.deployment.trainer.call_all("full_state"))[0]

    async def step(self) -> None:
        """One optimizer update on made-up experience."""
        records = []
        for member in range(2):
            ids = self._random.integers(4, 120, 24).astype(np.int32)
            n = 16
            records.append(
                Record(
                    trajectory=member,
                    group=0,
                    task=0,
                    prompt_tokens=8,
                    token_ids=ids,
                    loss_mask=np.ones(n, np.bool_),
                    generation_log_probs=np.full(n, -4.8, np.float32),
                    spans=((self.version, 0, n),),
                    reward=float(member),
                    finish_reason="stop",
                )
            )
        await self.deployment.trainer.train_update(records, self.version, 0, 1)

    async def prepare(self) -> None:
        """The next version, ready to travel."""
        await self.step()
        self.version += 1
        prepared = await self.path.prepare(self.version, self.deployment.engines)
        self.agreement.expect(self.version, prepared.expected)

    async def publish(self, pause: Callable[[Any], Any], between: Callable[[Any], Any]) -> None:
        """Pause, `between` (the KV rule), copy, agree, commit, resume."""
        engines = self.deployment.engines
        for engine in engines:
            await pause(engine.client)
            await between(engine.client)
        copied: list[int] = []
        await self.path.copy(self.version, engines, lambda handle: copied.append(handle.index))
        assert sorted(copied) == [0, 1]
        for engine in engines:
            await self.agreement.check(engine, self.version, "none")
            await self.agreement.commit(engine, self.version)
            await engine.client.resume()


@pytest.fixture(scope="module")
def reference(rig: Any) -> Reference:
    return Reference(rig.deployment.model.path)


@pytest.fixture(scope="module", params=PATHS)
def publisher(
    request: pytest.FixtureRequest, rig: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Publisher]:
    from tests.support.real_rig import for_real

    rig.wait(rig.deployment.reset(for_real(scenario())))
    made = Publisher(rig, request.param, tmp_path_factory.mktemp(request.param))
    yield made
    rig.wait(made.path.close())


@pytest.mark.parametrize(("rule", "kv"), RULES, ids=lambda x: str(x))
def test_ws_03_and_08_and_09_every_path_with_every_rule(
    publisher: Publisher, reference: Reference, rule: str, kv: str
) -> None:
    try:
        publisher.rig.wait(_case(publisher, reference, rule, kv), 120)
    except BaseException:
        publisher.rig.wait(_recover(publisher.deployment.engines), 60)
        raise


async def _recover(engines: Sequence[Any]) -> None:
    """Nothing runs and nothing is paused, whatever a failed test left."""
    for engine in engines:
        await engine.client.resume()
        await engine.client.pause("abort")
        await engine.client.resume()


async def _case(p: Publisher, reference: Reference, rule: str, kv: str) -> None:
    client = p.deployment.engines[0].client
    prompt, key = p.prompt(), f"{rule}-{kv}"

    def salted(version: int) -> str:
        return f"{key}-v{version}" if kv == "salt_by_version" else key

    async def generate(rid: str, ids: list[int], n: int, extra_key: str) -> Any:
        return await client.generate(
            rid=rid, input_ids=ids, max_new_tokens=n, temperature=1.0, ignore_eos=True, extra_key=extra_key
        )

    old, before = p.version, await p.weights()
    await p.prepare()
    new, after = p.version, await p.weights()

    async def in_flight(n: int) -> asyncio.Task[Any] | None:
        """A request of `n` tokens that is at it when its engine pauses; None: it had ended."""
        running = asyncio.create_task(generate(f"{key}-long-{n}", prompt, n, f"{n}-{salted(old)}"))
        for turn in range(50):  # short ones pass, until the long one is on its way
            await generate(f"{key}-short-{n}-{turn}", p.prompt(), 8, salted(old))
            if (await client.loads()).running:
                break
        if rule == "finish":
            await running
            return running
        await client.pause(rule)
        await asyncio.wait({running}, timeout=0.2)  # the answer of one that ended just before
        if not running.done() or running.result().finish_reason == "abort":
            return running
        await client.resume()
        return None

    for length in LONG:
        running = await in_flight(length)
        if running is not None:
            break
    assert running is not None, "no request was long enough"

    async def pause(engine: Any) -> None:
        if engine is not client or rule == "finish":
            await engine.pause("retract" if rule == "finish" else rule)

    async def treat_kv(engine: Any) -> None:
        if kv == "flush":
            assert await engine.flush()
        elif rule == "in_place" and engine is client:
            assert not await engine.flush(), "a flush is refused while requests are held"

    await p.publish(pause, treat_kv)
    long = await running

    # spans partition what was generated, and say which weights made it
    edges = [0, *(end for _, _, end in long.spans)]
    assert [start for _, start, _ in long.spans] == edges[:-1] and edges[-1] == len(long.output_ids)
    versions = [int(v) for v, _, _ in long.spans]
    cut = long.spans[0][2]
    expected = reference.log_probs(before, prompt, long.output_ids)
    assert np.abs(long.log_probs[:cut] - expected[:cut]).max() <= TOLERANCE
    if rule == "finish":
        assert versions == [old] and long.finish_reason == "length"
    elif rule == "abort":
        assert versions == [old] and long.finish_reason == "abort" and 0 < cut < length
    else:
        assert versions == [old, new] and len(long.output_ids) == length and 0 < cut < length
        now = reference.log_probs(after, prompt, long.output_ids)[cut:]
        difference = np.abs(long.log_probs[cut:] - now).max()
        if rule == "retract" and kv == "flush":
            assert difference <= TOLERANCE, "its KV was computed again with the new weights"
        else:
            assert difference > STALE, "it went on over KV of the old weights"

    # a new request with the same prompt: stale KV under `keep`, and only there
    again = await generate(f"{key}-again", prompt, 8, f"{length}-{salted(new)}")
    difference = np.abs(again.log_probs - reference.log_probs(after, prompt, again.output_ids)).max()
    if kv == "keep":
        assert again.cached_tokens > 0 and difference > STALE
    else:
        assert difference <= TOLERANCE
        if not (rule == "retract" and kv == "flush"):
            assert again.cached_tokens == 0

    # and the new weights are really there, on both engines
    fresh = p.prompt()
    for engine in p.deployment.engines:
        g = await engine.client.generate(
            rid=f"{key}-fresh", input_ids=fresh, max_new_tokens=8, ignore_eos=True, extra_key=f"{key}-fresh-{new}"
        )
        assert [int(v) for v, _, _ in g.spans] == [new]
        assert np.abs(g.log_probs - reference.log_probs(after, fresh, g.output_ids)).max() <= TOLERANCE
