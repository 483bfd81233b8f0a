"""What is installed, for `testbed doctor`. It imports none of what it looks for. The real backend, which is more than a
list of packages, is in `testbed.commands.real_parts`."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import Any

from testbed.commands.presets import preset_names
from testbed.commands.real_parts import real_backend
from testbed.scenario.catalogue import gpu_names, model_names

SIMULATOR = ("jinja2", "matplotlib", "msgspec", "numpy", "pyarrow", "pydantic", "scipy", "simpy", "yaml", "zstandard")
EXTRAS = {
    "tables": (("aiconfigurator_core",), "step latencies of other models and GPUs"),
    "cluster": (("ray",), "engines and trainers on several machines; part of real and gpu"),
}
"""Extra of the package -> (what it needs, what it is for)."""


def installed() -> dict[str, Any]:
    """Plain figures: Python, cores, what is missing for the simulator, each extra and the real backend; GPUs, models
    and framework presets by name."""
    return {
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
        "simulator_missing": _missing(SIMULATOR),
        "gpus": gpu_names(),
        "models": model_names(),
        "presets": preset_names(),
        "extras": {extra: {"missing": _missing(needs)} for extra, (needs, _) in EXTRAS.items()},
        "real": real_backend(),
    }


def _missing(packages: tuple[str, ...]) -> list[str]:
    return [package for package in packages if find_spec(package) is None]
