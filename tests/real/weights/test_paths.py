"""Every path to real engines: weights, names of versions, payloads, failures and the way back. The expectation for
log-probs is a transformers forward with the trainer's weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from real.errors import RealError, UpdateFailed
from real.weights.agree import Agreement
from real.weights.paths import WeightPath, weight_path
from tests.real.weights.conftest import Run
from tests.real.weights.fakes import FakeTrainer, answer, gap

NAMES = ("cuda_ipc", "broadcast", "p2p", "disk", "disk_delta")
CLOSE = 1e-4
"""fp32, engine against transformers."""


def make(name: str, trainer: FakeTrainer, folder: Path, timeout_s: float = 60.0, **options: Any) -> WeightPath:
    return weight_path(
        name, trainer, folder=folder, timeout_s=timeout_s, bucket_bytes=60_000, device="cpu", **options
    )  # the tiny model has 0.33 MB: several buckets


def agreement_of(trainer: FakeTrainer, folder: Path) -> Agreement:
    return Agreement(trainer, folder=folder, timeout_s=60)


async def publish(path: WeightPath, agreement: Agreement, version: int, handles: list[Any], rule: str = "none") -> Any:
    """All steps in the order the core asks for them."""
    prepared = await path.prepare(version, handles)
    agreement.expect(version, prepared.expected)
    for handle in handles:
        await handle.client.pause("retract")
    copied: list[int] = []
    await path.copy(version, handles, lambda handle: copied.append(handle.index))
    assert sorted(copied) == sorted(h.index for h in handles)
    for handle in handles:
        await agreement.check(handle, version, rule)
    for handle in handles:
        assert await handle.client.flush()
        await agreement.commit(handle, version)
        await handle.client.resume()
    return prepared


@pytest.mark.parametrize("name", NAMES)
def test_ws_02_ws_03_two_versions_reach_engines_of_one_and_two_ranks(
    name: str, trainer: FakeTrainer, handle: Any, wide: Any, tmp_path: Path, run: Run, rid: Callable[[], str]
) -> None:
    async def scenario() -> None:
        path, agreement = make(name, trainer, tmp_path), agreement_of(trainer, tmp_path)
        assert max([await gap(h.client, trainer, rid()) for h in (handle, wide)]) < CLOSE
        for version in (1, 2):
            trainer.step()
            assert min([await gap(h.client, trainer, rid()) for h in (handle, wide)]) > 100 * CLOSE  # old weights
            await publish(path, agreement, version, [handle, wide])
            for h in (handle, wide):
                assert await gap(h.client, trainer, rid()) < CLOSE
                served = await answer(h.client, rid())
                assert served.spans == ((str(version), 0, len(served.output_ids)),)
            if version == 2:
                await path.forget(1)
                agreement.forget(1)
                held = await trainer.call_all("publish", "held")
                everywhere = name in ("cuda_ipc", "p2p")
                assert held == [[2], [2] if everywhere else []]
        await path.close()

    run(scenario())


@pytest.mark.parametrize("name", NAMES)
def test_ws_11_spans_change_at_the_resume(
    name: str, trainer: FakeTrainer, handle: Any, tmp_path: Path, run: Run
) -> None:
    """A request held in place while version 1 comes: its tokens before are version 0's, those after version 1's."""
    request = {
        "input_ids": [3, 4, 5],
        "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True},
        "stream": True,  # so that we see it decode before we pause
    }

    async def scenario() -> None:
        path, agreement = make(name, trainer, tmp_path), agreement_of(trainer, tmp_path)
        trainer.step()
        prepared = await path.prepare(1, [handle])
        agreement.expect(1, prepared.expected)
        async with aiohttp.ClientSession() as http, http.post(f"{handle.client.url}/generate", json=request) as answer:
            await answer.content.readline()
            await handle.client.pause("in_place")
            decoded = (await handle.client.loads()).kv_used_tokens
            await path.copy(1, [handle], lambda _: None)
            await agreement.check(handle, 1, "none")
            assert await handle.client.weight_version() == "0"
            await agreement.commit(handle, 1)
            await handle.client.resume()
            meta: dict[str, Any] = {"completion_tokens": 0}
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    before, meta = meta, json.loads(line.removeprefix(b"data: "))["meta_info"]
                    if before["completion_tokens"] <= decoded < meta["completion_tokens"]:
                        await handle.client.abort_all()  # it has tokens of both versions
        spans = meta["weight_versions"]
        assert [span["version"] for span in spans] == ["0", "1"]
        assert spans[0]["start"] == 0 and spans[0]["end"] == spans[1]["start"]
        assert spans[1]["end"] == meta["completion_tokens"]
        await path.close()

    run(scenario())


@pytest.mark.parametrize("name", ("cuda_ipc", "broadcast", "p2p", "disk"))
def test_ws_01_the_payload_is_the_weights_and_nothing_else(
    name: str, trainer: FakeTrainer, handle: Any, tmp_path: Path, run: Run
) -> None:
    config = trainer.model.config
    hidden, width, layers = config.hidden_size, config.head_dim, config.num_hidden_layers
    q, kv = config.num_attention_heads * width, config.num_key_value_heads * width
    per_layer = hidden * (2 * q + 2 * kv) + 3 * hidden * config.intermediate_size + 2 * hidden + 2 * width
    parameters = 2 * config.vocab_size * hidden + layers * per_layer + hidden  # embedding and head, final norm

    async def scenario() -> None:
        path = make(name, trainer, tmp_path)
        prepared = await path.prepare(1, [handle])
        assert prepared.words == parameters
        assert prepared.bytes == prepared.full_bytes == 4 * parameters  # fp32; an optimizer would triple it
        await path.close()

    run(scenario())


@pytest.mark.parametrize("name", NAMES)
def test_ws_04_a_path_can_be_tried_with_the_weights_that_engines_have(
    name: str, trainer: FakeTrainer, handle: Any, tmp_path: Path, run: Run, rid: Callable[[], str]
) -> None:
    """Version 0 is sent to measure the path, twice; version 1 follows as if it had not been."""

    async def scenario() -> None:
        path, agreement = make(name, trainer, tmp_path), agreement_of(trainer, tmp_path)
        for _ in range(2):
            assert (await path.prepare(0, [handle])).bytes > 0
            await path.copy(0, [handle], lambda _: None)
            await agreement.check(handle, 0, "none")
        trainer.step()
        await publish(path, agreement, 1, [handle])
        assert await gap(handle.client, trainer, rid()) < CLOSE
        await path.close()

    run(scenario())


def test_ws_12_a_delta_is_small_where_few_words_change(
    trainer: FakeTrainer, handle: Any, tmp_path: Path, run: Run, rid: Callable[[], str]
) -> None:
    """One row of one matrix changes: the words of the delta are that row's."""

    async def scenario() -> None:
        path, agreement = make("disk_delta", trainer, tmp_path), agreement_of(trainer, tmp_path)
        with torch.no_grad():
            trainer.model.model.layers[0].mlp.up_proj.weight[3] += 0.5
        prepared = await publish(path, agreement, 1, [handle])
        assert prepared.changed_words == trainer.model.config.hidden_size
        assert prepared.bytes < prepared.full_bytes / 20
        assert await gap(handle.client, trainer, rid()) < CLOSE

    run(scenario())


@pytest.mark.parametrize("encoding", ("xor", "overwrite"))
def test_ws_12_a_poisoned_base_is_refused_and_then_replaced(
    encoding: str, trainer: FakeTrainer, handle: Any, tmp_path: Path, run: Run, rid: Callable[[], str]
) -> None:
    async def scenario() -> None:
        path = make("disk_delta", trainer, tmp_path, delta_encoding=encoding)
        agreement = agreement_of(trainer, tmp_path)
        trainer.step()
        await publish(path, agreement, 1, [handle])
        base = tmp_path / "node-0" / "weight_v000001" / "model.safetensors"
        with base.open("r+b") as file:  # one byte of one tensor
            file.seek(-1, 2)
            last = file.read(1)
            file.seek(-1, 2)
            file.write(bytes([last[0] ^ 1]))
        trainer.step()
        with pytest.raises(UpdateFailed, match=r"prepare: .*is not version 1"):
            await path.prepare(2, [handle])
        assert (await answer(handle.client, rid())).spans[0][0] == "1"  # the old version goes on serving
        await path.forget(2)
        trainer.step()
        prepared = await publish(path, agreement, 3, [handle])
        assert prepared.bytes == prepared.full_bytes
        assert await gap(handle.client, trainer, rid()) < CLOSE
        trainer.step()
        assert (await publish(path, agreement, 4, [handle])).bytes != prepared.full_bytes  # deltas again
        assert await gap(handle.client, trainer, rid()) < CLOSE

    run(scenario())


@pytest.mark.parametrize("rule", ("fp8", "int8"))
def test_ws_05_requantised_engines_agree_and_serve_other_weights(
    rule: str, trainer: FakeTrainer, handle: Any, tmp_path: Path, run: Run, rid: Callable[[], str]
) -> None:
    """The engine's log-probs are those of a transformers model whose projections went through the same rule."""
    from real.weights.quantize import fp8_blocks, int8_rows

    async def scenario() -> None:
        path, agreement = make("disk", trainer, tmp_path), agreement_of(trainer, tmp_path)
        trainer.step()
        await path.prepare(1, [handle])
        await handle.client.pause("retract")
        await path.copy(1, [handle], lambda _: None)
        digest = await agreement.check(handle, 1, rule)
        assert digest.changed == 4 * trainer.model.config.num_hidden_layers  # qkv, o, gate_up, down
        assert digest.requantize_s > 0
        with pytest.raises(UpdateFailed, match="agree: engine 0 rank 0"):  # no longer what the trainer sent
            await agreement.check(handle, 1, "none")
        await agreement.commit(handle, 1)
        await handle.client.resume()
        assert await gap(handle.client, trainer, rid()) > CLOSE
        with torch.no_grad():
            for layer in trainer.model.model.layers:
                a, m = layer.self_attn, layer.mlp
                for fused in ((a.q_proj, a.k_proj, a.v_proj), (a.o_proj,), (m.gate_proj, m.up_proj), (m.down_proj,)):
                    whole = torch.cat([linear.weight for linear in fused])
                    rounded = (fp8_blocks if rule == "fp8" else int8_rows)(whole)
                    for linear, rows in zip(fused, rounded.split([f.weight.shape[0] for f in fused]), strict=True):
                        linear.weight.copy_(rows)
        assert await gap(handle.client, trainer, rid()) < CLOSE

    run(scenario())


def test_ws_05_engines_that_hold_different_weights_do_not_agree(
    trainer: FakeTrainer, handle: Any, tmp_path: Path, run: Run
) -> None:
    """Two participants, each as its own expectation says, but not alike: the second is refused."""

    async def scenario() -> None:
        path, agreement = make("disk", trainer, tmp_path), agreement_of(trainer, tmp_path)
        for engine in (handle, replace(handle, index=5)):
            trainer.step()
            prepared = await path.prepare(1, [engine])
            agreement.expect(1, prepared.expected)
            await path.copy(1, [engine], lambda _: None)
            if engine is handle:
                await agreement.check(engine, 1, "fp8")
        with pytest.raises(UpdateFailed, match="agree: engines 0 and 5 hold different weights as v1"):
            await agreement.check(engine, 1, "fp8")

    run(scenario())


def test_ws_07_a_rule_that_does_not_exist_is_refused(
    trainer: FakeTrainer, handle: Any, tmp_path: Path, run: Run
) -> None:
    agreement = agreement_of(trainer, tmp_path)
    with pytest.raises(UpdateFailed, match="requantize: there is no rule 'fp6'; there are fp8, mxfp8, nvfp4, int8"):
        run(agreement.check(handle, 0, "fp6"))


def test_ws_14_weights_that_differ_are_found_and_restored(
    trainer: FakeTrainer, handle: Any, tmp_path: Path, run: Run, rid: Callable[[], str]
) -> None:
    """The checkpoint on storage is another one than the trainer's snapshot: agreement names the parameter."""

    async def scenario() -> None:
        path, agreement = make("disk", trainer, tmp_path), agreement_of(trainer, tmp_path)
        before = FakeTrainer(Path(trainer.fakes[0].options.model_path))
        trainer.step()
        prepared = await path.prepare(1, [handle])
        agreement.expect(1, prepared.expected)
        held = trainer.fakes[0].publisher._held[1]
        held["model.layers.1.mlp.down_proj.weight"][0, 0] += 1
        trainer.fakes[0].publisher.write(1, str(tmp_path))
        await handle.client.pause("retract")
        await path.copy(1, [handle], lambda _: None)
        with pytest.raises(UpdateFailed, match=r"1 of \d+ parameters differ from v1: model.layers.1.mlp.down_proj"):
            await agreement.check(handle, 1, "none")
        await agreement.restore(handle, 0)
        await agreement.commit(handle, 0)
        await handle.client.resume()
        assert await gap(handle.client, before, rid()) < CLOSE
        assert (await answer(handle.client, rid())).spans[0][0] == "0"

    run(scenario())


@pytest.mark.parametrize("name", ("disk", "disk_delta"))
def test_ws_14_a_torn_file_never_reaches_an_engine(
    name: str, trainer: FakeTrainer, handle: Any, tmp_path: Path, run: Run, rid: Callable[[], str]
) -> None:
    async def scenario() -> None:
        path = make(name, trainer, tmp_path)
        before = FakeTrainer(Path(trainer.fakes[0].options.model_path))
        trainer.step()
        await path.prepare(1, [handle])
        folder = tmp_path if name == "disk" else tmp_path / "node-0"
        file = folder / "weight_v000001" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        await handle.client.pause("retract")
        with pytest.raises(UpdateFailed, match=r"copy: engine 0: .*cut short or torn"):
            await path.copy(1, [handle], lambda _: None)
        await handle.client.resume()
        assert await gap(handle.client, before, rid()) < CLOSE

    run(scenario())


def test_ws_14_a_broadcast_that_one_engine_refuses_ends_for_all(
    trainer: FakeTrainer, handle: Any, wide: Any, tmp_path: Path, run: Run, rid: Callable[[], str]
) -> None:
    """One participant refuses to receive: the trainer does not hang in its broadcast, nor does the other participant,
    and the next broadcast works."""

    async def scenario() -> None:
        path, agreement = make("broadcast", trainer, tmp_path), agreement_of(trainer, tmp_path)
        trainer.step()
        both = [wide, handle]  # in a tree of broadcasts, the refusing one's ranks are between trainer and the other
        await publish(path, agreement, 1, both)
        serving = FakeTrainer(Path(trainer.fakes[0].options.model_path))
        serving.model.load_state_dict(trainer.model.state_dict())
        trainer.step()
        await path.prepare(2, both)
        for h in both:
            await h.client.pause("retract")
        receive, calls = wide.client.update_from_distributed, 0

        async def refused_once(**request: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 2:  # the first bucket is in: the weights are torn
                await wide.client.end_update()
            await receive(**request)

        wide.client.update_from_distributed = refused_once
        copied: list[Any] = []
        with pytest.raises(UpdateFailed, match=r"copy: engines 1, 0: .*must run between"):
            await path.copy(2, both, copied.append)
        wide.client.update_from_distributed = receive
        assert copied == []
        for h in both:
            await agreement.restore(h, 1)
            await h.client.resume()
            assert await gap(h.client, serving, rid()) < CLOSE
            assert (await answer(h.client, rid())).spans[0][0] == "1"
        await publish(path, agreement, 3, both)
        assert await gap(handle.client, trainer, rid()) < CLOSE
        await path.close()

    run(scenario())


def test_ws_14_a_broadcast_that_is_never_sent_times_out(
    trainer: FakeTrainer, handle: Any, tmp_path: Path, run: Run, rid: Callable[[], str]
) -> None:
    async def scenario() -> None:
        path, agreement = make("broadcast", trainer, tmp_path), agreement_of(trainer, tmp_path)
        trainer.step()
        await publish(path, agreement, 1, [handle])
        impatient = make("broadcast", trainer, tmp_path, timeout_s=2.0)
        trainer.step()
        await impatient.prepare(2, [handle])
        await handle.client.pause("retract")
        publisher = trainer.fakes[0].publisher
        send, publisher.start_broadcast = publisher.start_broadcast, lambda version, names: None
        with pytest.raises(UpdateFailed, match="copy: engines 0: not done within 2 s"):
            await impatient.copy(2, [handle], lambda _: None)
        publisher.start_broadcast = send
        await agreement.restore(handle, 1)
        await handle.client.resume()
        assert (await answer(handle.client, rid())).spans[0][0] == "1"
        await path.close()

    run(scenario())


def test_ws_14_a_source_that_dies_leaves_the_engine_restorable(
    trainer: FakeTrainer, handle: Any, tmp_path: Path, run: Run, rid: Callable[[], str]
) -> None:
    async def scenario() -> None:
        path, agreement = make("p2p", trainer, tmp_path, timeout_s=20.0), agreement_of(trainer, tmp_path)
        before = FakeTrainer(Path(trainer.fakes[0].options.model_path))
        trainer.step()
        await path.prepare(1, [handle])
        trainer.fakes[1].publisher._server.close()
        await handle.client.pause("retract")
        with pytest.raises(UpdateFailed, match=r"copy: engine 0: .*Connection refused"):
            await path.copy(1, [handle], lambda _: None)
        await agreement.restore(handle, 0)
        await handle.client.resume()
        assert await gap(handle.client, before, rid()) < CLOSE

    run(scenario())


def test_ws_14_a_version_that_was_forgotten_cannot_be_copied(
    trainer: FakeTrainer, handle: Any, tmp_path: Path, run: Run
) -> None:
    async def scenario() -> None:
        for name in NAMES:
            path = make(name, trainer, tmp_path / name, timeout_s=20.0)
            await path.prepare(1, [handle])
            await path.forget(1)
            with pytest.raises(UpdateFailed, match="copy: "):
                await path.copy(1, [handle], lambda _: None)
            await path.close()

    run(scenario())


def test_ws_13_an_engine_rank_pulls_only_its_shards(trainer: FakeTrainer, wide: Any, tmp_path: Path, run: Run) -> None:
    """Two ranks of half the heads, columns and vocabulary: the weights once, the replicated norms twice."""
    from real.weights.commands import command

    async def scenario() -> None:
        path = make("p2p", trainer, tmp_path)
        prepared = await path.prepare(1, [wide])
        answers = await command(
            wide,
            "pull",
            60,
            version=1,
            sources=path._sources,
            planned=[0, 1],
            config=path._config,
            shapes=path._shapes,
        )
        norms = sum(p.numel() for n, p in trainer.model.named_parameters() if n.endswith("norm.weight"))
        assert sum(a["bytes"] for a in answers) == prepared.bytes + 4 * norms
        assert all(min(a["bytes_by_source"]) > 0 for a in answers)  # both sources, both ranks

    run(scenario())


def test_an_unknown_path_is_named(trainer: FakeTrainer, tmp_path: Path) -> None:
    with pytest.raises(RealError, match="no weight path 'nccl'; there are cuda_ipc, broadcast"):
        make("nccl", trainer, tmp_path)
