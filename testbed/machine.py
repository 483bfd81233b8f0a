"""What machine this is, as far as step times depend on it (processor, cores, GPU), and whether it is busy."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def machine() -> dict[str, str]:
    """`cpu`, `cores` (that this process may use) and, where there is one, `gpu`."""
    found = {"cpu": _cpu(), "cores": str(_cores())}
    gpus = nvidia_gpus()
    return found | ({"gpu": gpus[0]["name"]} if gpus else {})


BUSY = 0.5
"""Runnable tasks per core from which measured times are not the machine's own."""


def busy() -> str:
    """A sentence if others use the machine now; empty if it is idle, or cannot say."""
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):
        return ""
    cores = _cores()
    if load <= BUSY * cores:
        return ""
    return f"this machine is busy (load {load:.1f} on {cores} cores): what is measured now is slower than it need be"


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def nvidia_gpus() -> list[dict[str, Any]]:
    """NVIDIA GPUs of this machine: name, memory in GB."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.rsplit(",", 2) for line in done.stdout.splitlines() if line.count(",") >= 2]
    mib = 2**20 / 1e9
    return [{"name": name, "total_gb": float(total) * mib, "free_gb": float(free) * mib} for name, total, free in rows]
