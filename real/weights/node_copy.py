"""The copy of the weights on an engine's node: deltas are put onto it while the engine still generates.

One folder per version, a file `current` that names the one deltas start from, and a file `poisoned` while that one
cannot be trusted. All state is on disk, so a restarted process goes on where the last one stopped. Refuses to know
engines: it publishes folders that an engine can load."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from real.weights.checkpoint import check_whole, load_checkpoint, published, save_checkpoint
from real.weights.delta import DeltaRefused, apply_delta, read_manifest
from real.weights.partition import read_config


class NodeCopy:
    """Lives on the engine's node, in any process there. Methods raise DeltaRefused or RealError and then leave the
    published versions as they were."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def current(self) -> int | None:
        """The version deltas start from; None without one that can be trusted."""
        if self._poison.exists() or not self._current.exists():
            return None
        return int(self._current.read_text())

    def empty(self) -> bool:
        return not self._current.exists()

    def path(self, version: int) -> str | None:
        """The folder an engine loads this version from, None if not held or poisoned. Raises RealError if torn."""
        folder = self._version(version)
        if not folder.is_dir() or (self._poison.exists() and version == self._stated()):
            return None
        check_whole(folder)
        return str(folder)

    def seed(self, model_path: str, dtype: str) -> None:
        """Version 0: the checkpoint the engine was started with, in the engine's dtype."""
        tensors = load_checkpoint(model_path, getattr(torch, dtype))
        save_checkpoint(self._version(0), tensors, read_config(model_path))
        self._trust(0)

    def install(self, checkpoint: str, version: int) -> str:
        """A full copy of a published checkpoint (the resynchronisation after a poisoned base)."""
        check_whole(Path(checkpoint))
        with published(self._version(version)) as temporary:
            shutil.copytree(checkpoint, temporary, dirs_exist_ok=True)
        self._trust(version)
        return str(self._version(version))

    def apply(self, delta: str) -> str:
        """Put a delta onto the current version and publish the result as the new current one."""
        manifest = read_manifest(Path(delta))
        have = self.current()
        if have is None:
            raise DeltaRefused("no base that can be trusted: a full copy is needed", poisoned=True)
        if have == manifest.version:
            raise DeltaRefused(f"version {have} is already here: a delta is applied once")
        if have != manifest.base_version:
            raise DeltaRefused(f"wrong base: version {have} is here, the delta starts from {manifest.base_version}")
        try:
            apply_delta(Path(delta), self._version(have), self._version(manifest.version))
        except DeltaRefused as refused:
            if refused.poisoned:
                self._poison.touch()
            raise
        self._trust(manifest.version)
        return str(self._version(manifest.version))

    def forget(self, version: int) -> None:
        """Drop a version; deltas then start from the newest that is left."""
        was_current = self._stated() == version
        shutil.rmtree(self._version(version), ignore_errors=True)
        if was_current:
            left = sorted(int(f.name.removeprefix("weight_v")) for f in self.folder.glob("weight_v*"))
            if left:
                self._trust(left[-1])
            else:
                self._current.unlink()

    @property
    def _current(self) -> Path:
        return self.folder / "current"

    @property
    def _poison(self) -> Path:
        return self.folder / "poisoned"

    def _version(self, version: int) -> Path:
        return version_folder(self.folder, version)

    def _stated(self) -> int | None:
        return int(self._current.read_text()) if self._current.exists() else None

    def _trust(self, version: int) -> None:
        temporary = self.folder / ".current"
        temporary.write_text(str(version))
        temporary.replace(self._current)
        self._poison.unlink(missing_ok=True)


def version_folder(folder: Path, version: int) -> Path:
    """Where a published version lies below `folder`."""
    return folder / f"weight_v{version:06d}"
