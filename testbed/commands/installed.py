"""What is installed, for `testbed doctor`. It imports none of what it looks for."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import Any

from testbed.scenario.catalogue import gpu_names, model_names

SIMULATOR = ("jinja2", "matplotlib", "msgspec", "numpy", "pyarrow", "pydantic", "scipy", "simpy", "yaml", "zstandard")
EXTRAS = {
    "tables": (("aiconfigurator_core",), "step latencies of other models and GPUs"),
    "gpu": (("torch", "transformers", "sglang"), "engines and trainer on GPUs"),
    "cluster": (("ray",), "engines and trainers on several machines"),
}
"""Extra of the package -> (what it needs, what it is for)."""


def installed() -> dict[str, Any]:
    """Plain figures: Python, cores, what is missing for the simulator and for each extra, GPUs and models by name."""
    return {
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
        "simulator_missing": _missing(SIMULATOR),
        "gpus": gpu_names(),
        "models": model_names(),
        "extras": {extra: {"missing": _missing(needs)} for extra, (needs, _) in EXTRAS.items()},
    }


def _missing(packages: tuple[str, ...]) -> list[str]:
    return [package for package in packages if find_spec(package) is None]
