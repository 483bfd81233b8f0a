"""What one SGLang server is started with: options in SGLang's names, turned into a command line and an environment.

Knows the flags that differ between a machine without a GPU and one with; refuses to know processes and ports in use."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import real
from real.errors import RealError

REPOSITORY = Path(real.__file__).resolve().parents[1]
"""Folder from which a process imports `real` (repository root or site-packages)."""


def python_path(existing: str | None) -> str:
    """PYTHONPATH with which another interpreter finds this `real` first."""
    return os.pathsep.join(p for p in (str(REPOSITORY), existing) if p)


@dataclass(frozen=True)
class ServerOptions:
    """Options of one server. None leaves SGLang's own default."""

    model_path: str
    """A local Hugging Face folder: config.json and safetensors."""
    port: int = 0
    """0: a free one, chosen when the server starts."""
    host: str = "127.0.0.1"
    device: str = "cpu"
    """`cpu` or `cuda`; on `cuda` the stock package chooses device and attention backend itself."""
    dtype: str = "float32"
    tp_size: int = 1
    max_total_tokens: int | None = None
    """KV slots, tokens."""
    max_running_requests: int = 16
    context_length: int | None = None
    chunked_prefill_size: int | None = None
    max_prefill_tokens: int | None = None
    page_size: int | None = None
    schedule_policy: str | None = None
    schedule_conservativeness: float | None = None
    disable_overlap_schedule: bool = False
    disable_radix_cache: bool = False
    mem_fraction_static: float | None = None
    kv_cache_dtype: str = "auto"
    enable_return_routed_experts: bool = False
    enable_memory_saver: bool = False
    random_seed: int = 0
    gpus: tuple[int, ...] = ()
    """Indices on the node; empty: what the surrounding process may use."""
    command: tuple[str, ...] = ()
    """What starts a server, up to its flags; empty: this Python's `-m sglang.launch_server`. The engine's environment
    may be another one than the trainer's."""
    extra_args: tuple[str, ...] = ()
    custom_weight_loader: tuple[str, ...] = ("real.weights.engine_side.handle",)
    """Functions that the engine imports when a weight update names them as its `load_format`."""

    def check(self) -> ServerOptions:
        """Raise `RealError` if the model path holds no model or the counts disagree; else return self."""
        path = Path(self.model_path)
        if not (path / "config.json").is_file():
            what = "has no config.json" if path.is_dir() else "does not exist"
            raise RealError(
                f"model path {self.model_path!r} {what}: expected a local Hugging Face model folder "
                "(config.json and *.safetensors; for a model on the hub, download it first and give its folder)"
            )
        if self.gpus and len(self.gpus) != self.tp_size:
            raise RealError(f"an engine with tp_size {self.tp_size} needs as many GPUs, got gpus {self.gpus}")
        return self

    def argv(self) -> list[str]:
        """The whole command. `port` must be set by now."""
        valued: dict[str, object] = {
            "model-path": self.model_path,
            "host": self.host,
            "port": self.port,
            "dtype": self.dtype,
            "tp-size": self.tp_size,
            "max-total-tokens": self.max_total_tokens,
            "max-running-requests": self.max_running_requests,
            "context-length": self.context_length,
            "chunked-prefill-size": self.chunked_prefill_size,
            "max-prefill-tokens": self.max_prefill_tokens,
            "page-size": self.page_size,
            "schedule-policy": self.schedule_policy,
            "schedule-conservativeness": self.schedule_conservativeness,
            "mem-fraction-static": self.mem_fraction_static,
            "kv-cache-dtype": self.kv_cache_dtype,
            "random-seed": self.random_seed,
            "weight-version": "0",  # published versions are counted from here, so spans read as integers
            "log-level-http": "warning",
        }
        switches = {
            "skip-tokenizer-init": True,  # token ids in, token ids out
            "enable-metrics": True,  # also what puts times into the answers
            "sleep-on-idle": True,  # an idle scheduler spins on a core otherwise
            "disable-overlap-schedule": self.disable_overlap_schedule,
            "disable-radix-cache": self.disable_radix_cache,
            "enable-return-routed-experts": self.enable_return_routed_experts,
            "enable-memory-saver": self.enable_memory_saver,
        }
        if self.device == "cpu":
            valued |= {"device": "cpu", "attention-backend": "torch_native"}
            switches["disable-cuda-graph"] = True
        argv = list(self.command or (sys.executable, "-m", "sglang.launch_server"))
        for name, value in valued.items():
            argv += [] if value is None else [f"--{name}", str(value)]
        argv += [f"--{name}" for name, on in switches.items() if on]
        argv += ["--custom-weight-loader", *self.custom_weight_loader] if self.custom_weight_loader else []
        return argv + list(self.extra_args)

    def env(self) -> dict[str, str]:
        """What the server's environment has beside that of the process that starts it."""
        env = {
            "PYTHONPATH": python_path(os.environ.get("PYTHONPATH")),
            # /health that generates a token waits a second, and for ever while the engine is paused.
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        }
        if self.device == "cpu":
            env |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            # A CUDA build of torch brings NCCL, and SGLang then makes NCCL groups for tensor parallelism even on a
            # CPU; where it finds no library it goes without.
            env["SGLANG_NCCL_SO_PATH"] = "none-on-cpu"
            if self.tp_size > 1:  # without NUMA nodes to spread over, SGLang asks for the cores of each rank
                cores = os.cpu_count() or 1
                env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank % cores) for rank in range(self.tp_size))
        if self.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.gpus))
        return env
