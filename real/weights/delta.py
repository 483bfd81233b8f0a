"""Weight deltas on disk: what changed from one named version to the next, and how it is put onto a copy of the base.

A delta is a folder with `manifest.json` (msgspec: `Manifest`) and `delta.bin` (one zstd frame per changed tensor).
`xor`: base XOR result, to be applied exactly once. `overwrite`: positions (uint64, in words of the dtype) and new
words. Both name the version they start from, and carry checksums of base and result per tensor, so that a torn delta, a
wrong base and a second application are refused before anything is published. Refuses to know engines and trainers.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import torch
import zstandard

from real.weights.checkpoint import WEIGHTS, byte_ranges, published
from real.weights.raw import checksum, raw, size

Encoding = Literal["xor", "overwrite"]
MANIFEST, PAYLOAD = "manifest.json", "delta.bin"
LEVEL = 1


class DeltaRefused(ValueError):
    """The delta cannot be put onto this base; the base is untouched. `poisoned`: the base itself is not what its
    version says, so only a full copy helps."""

    def __init__(self, reason: str, poisoned: bool = False) -> None:
        super().__init__(reason, poisoned)
        self.reason = reason
        self.poisoned = poisoned

    def __str__(self) -> str:
        return self.reason


class Entry(msgspec.Struct, frozen=True):
    """One tensor. `start` and `stop` are its bytes in the payload file, equal if it did not change."""

    base: str
    result: str
    start: int
    stop: int


class Manifest(msgspec.Struct, frozen=True):
    version: int
    base_version: int
    encoding: Encoding
    word_bytes: int
    payload_bytes: int
    payload_checksum: str
    tensors: dict[str, Entry]


@dataclass(frozen=True)
class DeltaReport:
    """`bytes` on disk (payload and manifest) against `full_bytes` of the weights; words are elements in the engine's
    dtype, counted as changed if any bit differs."""

    bytes: int
    full_bytes: int
    words: int
    changed_words: int


def words(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's elements as unsigned integers [numel]; shares memory."""
    return np.frombuffer(raw(tensor), dtype=f"u{tensor.element_size()}")


def encode(base: np.ndarray, result: np.ndarray, encoding: Encoding) -> bytes:
    """The frame of one changed tensor; `base` and `result` are words [n] of equal dtype."""
    if encoding == "xor":
        payload = (base ^ result).tobytes()
    else:
        where = np.flatnonzero(base != result)
        payload = where.astype("<u8").tobytes() + result[where].tobytes()
    return zstandard.ZstdCompressor(level=LEVEL).compress(payload)


def patch(target: np.ndarray, frame: bytes, encoding: Encoding) -> None:
    """Put one frame onto the base words `target` [n], in place. Raises DeltaRefused if it does not fit."""
    try:
        payload = zstandard.ZstdDecompressor().decompress(frame)
    except zstandard.ZstdError as error:
        raise DeltaRefused(f"torn delta: {error}") from None
    if encoding == "xor":
        if len(payload) != target.nbytes:
            raise DeltaRefused(f"torn delta: {len(payload)} bytes for a tensor of {target.nbytes}")
        np.bitwise_xor(target, np.frombuffer(payload, dtype=target.dtype), out=target)
    else:
        count = len(payload) // (8 + target.itemsize)
        where = np.frombuffer(payload, dtype="<u8", count=count)
        if len(payload) != count * (8 + target.itemsize) or (count and where[-1] >= len(target)):
            raise DeltaRefused("torn delta: positions outside the tensor")
        target[where] = np.frombuffer(payload, dtype=target.dtype, offset=8 * count)


def write_delta(
    folder: Path,
    base: Mapping[str, torch.Tensor],
    result: Mapping[str, torch.Tensor],
    *,
    base_version: int,
    version: int,
    encoding: Encoding,
) -> DeltaReport:
    """Publish the delta from `base` to `result` (same names, shapes and dtype). Raises ValueError if they differ."""
    if {n: (t.shape, t.dtype) for n, t in base.items()} != {n: (t.shape, t.dtype) for n, t in result.items()}:
        raise ValueError("the versions of a delta differ in names, shapes or dtypes")
    entries: dict[str, Entry] = {}
    changed = total = offset = 0
    with published(folder) as temporary:
        with (temporary / PAYLOAD).open("wb") as payload:
            for name, new in result.items():
                before, after = words(base[name]), words(new)
                differing = int(np.count_nonzero(before != after))
                frame = encode(before, after, encoding) if differing else b""
                payload.write(frame)
                entries[name] = Entry(checksum(base[name]), checksum(new), offset, offset + len(frame))
                offset, changed, total = offset + len(frame), changed + differing, total + len(after)
        item = next(iter(result.values())).element_size()
        data = checksum((temporary / PAYLOAD).read_bytes())
        manifest = Manifest(version, base_version, encoding, item, offset, data, entries)
        encoded = msgspec.json.encode(manifest)
        (temporary / MANIFEST).write_bytes(encoded)
    return DeltaReport(offset + len(encoded), sum(map(size, result.values())), total, changed)


def read_manifest(folder: Path) -> Manifest:
    """Raises DeltaRefused for a delta that is not there, torn or not one of ours."""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
        payload = (folder / PAYLOAD).read_bytes()
    except (OSError, msgspec.DecodeError) as error:
        raise DeltaRefused(f"torn delta: {error}") from None
    if len(payload) != manifest.payload_bytes or checksum(payload) != manifest.payload_checksum:
        raise DeltaRefused(f"torn delta: {folder.name} has a payload its manifest does not describe")
    return manifest


def apply_delta(delta: Path, base: Path, folder: Path) -> None:
    """Publish `folder` = the checkpoint `base` with `delta` on it. Every changed and unchanged tensor is checked
    against its checksum before and after; raises DeltaRefused, and then nothing was published."""
    manifest = read_manifest(delta)
    with published(folder) as temporary:
        shutil.copytree(base, temporary, dirs_exist_ok=True)
        ranges = byte_ranges(temporary / WEIGHTS)
        if set(ranges) != set(manifest.tensors):
            raise DeltaRefused("wrong base: it has other tensors than the delta", poisoned=True)
        file_bytes = np.memmap(temporary / WEIGHTS, dtype=np.uint8, mode="r+")
        with (delta / PAYLOAD).open("rb") as payload:
            for name, entry in manifest.tensors.items():
                start, stop = ranges[name]
                target = file_bytes[start:stop]
                if checksum(target.data) != entry.base:
                    raise DeltaRefused(f"wrong base: {name} is not version {manifest.base_version}", poisoned=True)
                if entry.start < entry.stop:
                    payload.seek(entry.start)
                    patch(
                        target.view(f"u{manifest.word_bytes}"),
                        payload.read(entry.stop - entry.start),
                        manifest.encoding,
                    )
                    if checksum(target.data) != entry.result:
                        raise DeltaRefused(f"{name} is not version {manifest.version} after the delta")
        file_bytes.flush()
