"""Stand-in for SGLang's compiled kernels (`sgl_kernel`), in plain PyTorch, for machines without a GPU.

Package registries carry only the CUDA build of `sgl_kernel`, but SGLang's CPU path imports a few of its `*_cpu` names
when it loads. On a processor without AMX it then computes with native PyTorch operators, so most of the names need only
exist. Two index helpers have bodies here because pauses, speculative decoding and KV moves may call them.

It knows nothing of the testbed. It must never be installed beside a GPU: it owns the module name `sgl_kernel`, and
SGLang would find it in place of its kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

__version__ = "0.1.0+cpu.shim"


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write each request's new KV slots into its row of the token table, in place.

    Row `req_pool_indices[i]` of `req_to_token` [requests, pool_len] gets, at positions `start[i]` to `end[i]` (not
    included), the next `end[i] - start[i]` entries of `out_cache_loc` [sum of the lengths].
    """
    offset = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        slots = out_cache_loc[offset : offset + last - first]
        req_to_token[row, first:last] = slots.to(req_to_token.dtype)
        offset += last - first


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Copy KV slots `src_loc` [n] to `tgt_loc` [n] in every buffer, as if all were read before any is written.

    `data_ptrs` [buffers] are addresses of contiguous buffers, `strides` [buffers] the bytes of one slot in each.
    """
    targets, sources = tgt_loc.tolist(), src_loc.tolist()
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        slots = [ctypes.string_at(address + source * stride, stride) for source in sources]
        for target, slot in zip(targets, slots, strict=True):
            ctypes.memmove(address + target * stride, slot, stride)


def __getattr__(name: str) -> Callable[..., Any]:
    """Any other `*_cpu` name can be imported; calling it raises NotImplementedError with the name."""
    if not name.endswith("_cpu"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is not in the stand-in for machines without a GPU")

    return missing


PAUSED = "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine"
"""What a paused scheduler calls in every turn of its loop."""


def sleep_while_paused(_: None, scheduler: Any) -> None:
    """Wait for a message, as an idle scheduler does under `--sleep-on-idle`; without it, or without that option, a
    paused one spins on a core that the trainer wants."""
    scheduler.maybe_sleep_on_idle()


def sglang_plugin() -> None:
    """Entry point `sglang.srt.plugins`, called by SGLang in each of its processes.

    `--enable-return-routed-experts` keeps a host buffer, which by default is registered with CUDA; on the CPU it is
    ordinary memory. And a paused scheduler sleeps.
    """
    from sglang.srt.mem_cache.pool_host import common
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def allocate(dims: tuple[int, ...], dtype: torch.dtype, device: str, pin_memory: bool, allocator: Any) -> Any:
        return torch.empty(dims, dtype=dtype, device=device)

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate
    HookRegistry.register(PAUSED, sleep_while_paused, HookType.AFTER)
