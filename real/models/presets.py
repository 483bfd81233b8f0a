"""The small models that real runs use by name. Their architecture numbers are entries of `testbed/data/models.json`, so
a simulation knows the same models.

Refuses to know how a model is built (`build.py`)."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

TINY = ("tiny-llama", "tiny-qwen3", "tiny-qwen3-moe", "deep-qwen3", "wide-qwen3")
"""Made by seed, with a character tokenizer: 0.8 to 1.9 M parameters. `deep-qwen3` is deep and narrow: its steps are
long enough to be compared with their simulation, and it is small enough to leave the memory of its neighbours alone.
`wide-qwen3` has as many tensors and 16 times the bytes (15.8 M parameters): what a weight update's bytes cost."""

SMOLLM2 = "smollm2-135m"

PRESETS = (*TINY, SMOLLM2)


def architecture(name: str) -> dict[str, Any]:
    """The numbers of a preset, under the names of a Hugging Face `config.json`."""
    numbers: dict[str, Any] = json.loads(files("testbed").joinpath("data/models.json").read_text())[name]
    return numbers
