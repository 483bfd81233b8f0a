"""Do the engines hold what the trainer sent? Checksums before requantisation, digests after it, and the way back.

Before requantisation every parameter of every rank is compared with what the trainer's snapshot gives in the engine's
layout. Requantisation happens on the engine's own copy, so afterwards only engines can be compared with each other:
those of one layout (TP size) must have one digest. Refuses to know how weights got there."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from real.errors import EngineRefused, UpdateFailed
from real.weights.checkpoint import check_whole
from real.weights.commands import command
from real.weights.handle import Checksums, Digest, EngineHandle
from real.weights.node_copy import version_folder
from real.weights.quantize import RULES
from real.weights.steps import stage

if TYPE_CHECKING:
    from real.trainer.trainer import Trainer


async def requantize_and_agree(
    engine: EngineHandle, version: int, quantization: str, expected: Checksums, timeout_s: float = 600.0
) -> Digest:
    """Compare an engine's parameters with `expected` (by TP rank), then requantise them (`none` or a name in `RULES`).

    Raises:
        UpdateFailed: `requantize` for a rule that does not exist or fails, `agree` for parameters that differ.
        EngineGone: the engine died.
    """
    who = f"engine {engine.index}"
    if quantization != "none" and quantization not in RULES:
        raise UpdateFailed("requantize", f"there is no rule {quantization!r}; there are {', '.join(RULES)} and none")
    async with stage("agree", who, timeout_s):
        answers = await command(engine, "checksum", timeout_s)
    for rank, (answer, want) in enumerate(zip(answers, expected, strict=True)):
        have = answer["checksums"]
        differing = [name for name in sorted(want.keys() | have.keys()) if want.get(name) != have.get(name)]
        if differing:
            named = ", ".join(differing[:3]) + (", ..." if len(differing) > 3 else "")
            raise UpdateFailed(
                "agree",
                f"{who} rank {rank}: {len(differing)} of {len(want)} parameters differ from v{version}: {named}",
            )
    check_s, changed, requantize_s, stored = max(a["seconds"] for a in answers), 0, 0.0, 0
    if quantization != "none":
        async with stage("requantize", who, timeout_s):
            answers = await command(engine, "requantize", timeout_s, rule=quantization)
        changed, requantize_s = answers[0]["parameters"], max(a["requantize_s"] for a in answers)
        stored = sum(a["stored_bytes"] for a in answers)
    return Digest(version, _digest(answers), engine.tp_size, changed, check_s, requantize_s, stored)


def _digest(answers: list[dict[str, dict[str, str]]]) -> str:
    total = xxhash.xxh3_128()
    for answer in answers:
        for name, value in sorted(answer["checksums"].items()):
            total.update(f"{name}={value};".encode())
    return total.hexdigest()


class Agreement:
    """The agreement of all engines of one run, for one trainer. `folder`: shared with the engines' nodes, where a
    version is written that an engine needs back."""

    def __init__(self, trainer: Trainer, *, folder: Path, timeout_s: float) -> None:
        self._trainer = trainer
        self._folder = folder
        self._timeout_s = timeout_s
        self._expected: dict[tuple[int, int], Checksums] = {}
        self._digests: dict[tuple[int, int, str], tuple[int, str]] = {}
        self._rule: dict[int, str] = {}

    def expect(self, version: int, expected: dict[int, Checksums]) -> None:
        """What `Prepared.expected` says: without it, checking asks the trainer, and waits while that trains."""
        self._expected.update(((version, tp_size), checksums) for tp_size, checksums in expected.items())

    async def check(self, engine: EngineHandle, version: int, quantization: str) -> Digest:
        """`requantize_and_agree` against the trainer's snapshot, and the digest against those of engines before."""
        expected = await self._expected_by(engine, version)
        digest = await requantize_and_agree(engine, version, quantization, expected, self._timeout_s)
        first, value = self._digests.setdefault((version, engine.tp_size, quantization), (engine.index, digest.value))
        if value != digest.value:
            raise UpdateFailed("agree", f"engines {first} and {engine.index} hold different weights as v{version}")
        self._rule[engine.index] = quantization
        return digest

    async def restore(self, engine: EngineHandle, version: int) -> None:
        """Put a version back on a paused engine whose copy was torn or given up, as it was served: written from the
        trainer's snapshot (version 0: the start checkpoint), loaded from disk, requantised, checked.

        Raises UpdateFailed("copy" | "agree" | "requantize") and EngineGone."""
        async with stage("copy", f"engine {engine.index}, v{version} again", self._timeout_s):
            written = version_folder(self._folder, version)
            if not written.is_dir():
                written = Path(await self._trainer.call(0, "publish", "retained", version, str(self._folder)))
            await asyncio.to_thread(check_whole, written)
            with contextlib.suppress(EngineRefused):  # of the torn update, if it left one
                await engine.client.end_update()
            await load_from_disk(engine, str(written))
        expected = await self._expected_by(engine, version)
        await requantize_and_agree(engine, version, self._rule.get(engine.index, "none"), expected, self._timeout_s)

    async def commit(self, engine: EngineHandle, version: int) -> None:
        """Name the engine's weights `version`, while it is paused: tokens from its resume on carry the new name. The
        only call that sets a version, for every path. Raises UpdateFailed("agree") and EngineGone."""
        async with stage("agree", f"engine {engine.index}", self._timeout_s):
            await engine.client.set_weight_version(str(version))

    def forget(self, version: int) -> None:
        """Drop what is kept for a version."""
        self._expected = {k: v for k, v in self._expected.items() if k[0] != version}
        self._digests = {k: v for k, v in self._digests.items() if k[0] != version}

    async def _expected_by(self, engine: EngineHandle, version: int) -> Checksums:
        key = (version, engine.tp_size)
        if key not in self._expected:
            async with stage("agree", f"trainer, v{version}", self._timeout_s):
                self._expected[key] = await self._trainer.call(0, "publish", "expected", version, engine.tp_size)
        return self._expected[key]


async def load_from_disk(engine: EngineHandle, path: str) -> None:
    """Load a checkpoint folder and keep the version's name: SGLang wants one, and gets the one it has."""
    served = await engine.client.weight_version()
    await engine.client.update_from_disk(path, weight_version=served, flush_cache=False)
