"""The numbers that no data sheet gives: what trainers and weight updates cost beyond FLOPs, bytes and links.

Each is fitted to published measurements, never to a number that is reported as predicted; its entry in
`testbed/data/published/coefficients.json` names table, rows, interval and source, and `testbed published --fit TABLE`
fits it again. It refuses to know how a coefficient is used.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files

import msgspec
from msgspec import Struct


class Coefficients(Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes per second, seconds, or plain shares."""

    broadcast_convert_bytes_per_s: float
    """One pipeline stage gathers and converts buckets of the trainer's weights before it broadcasts them."""
    broadcast_receiver_s: float
    """Per bucket and receiving GPU: what the control plane pays in turn (calls, acknowledgements)."""
    checkpoint_engine_reload_bytes_per_s: float
    """checkpoint-engine: engines copy what is theirs out of a bucket, between two buckets."""
    checkpoint_engine_receiver_s: float
    """checkpoint-engine: per bucket and receiving GPU."""
    p2p_source_bytes_per_s: float
    """Per trainer node: gather, convert and stage the shards of the trained weights."""
    ipc_convert_bytes_per_s: float
    """Gather and convert for CUDA IPC; every rank sees the whole model."""
    ipc_tensor_s: float
    """Per tensor: handle exchange and set-up of the copy."""
    delta_build_bytes_per_s: float
    """Per trainer node: compare with the snapshot, compress, checksum."""
    reload_bytes_per_s: float
    """Per engine GPU: host memory into the served tensors."""
    requantize_bytes_per_s: float
    """Per engine GPU, of 16-bit bytes."""
    trainer_linear_mfu: float
    """Matrix products with weights, of the BF16 peak, without what is computed again."""
    trainer_attention_mfu: float
    """Causal attention, of the BF16 peak, without what is computed again."""
    trainer_activation_passes: float
    """Times that the 16-bit activations of a layer pass the memory: layers x hidden x (1 + experts per token)."""
    trainer_logits_passes: float
    """Times that the 32-bit logits pass the memory: log-probs, entropy and their gradients."""


class Provenance(Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of the file."""

    value: float
    unit: str
    table: str
    """Whose rows it was fitted to: a file of `testbed/data/published`, or a source."""
    rows: tuple[str, ...]
    low: float | None = None
    """95 % interval of the fit; null where there are as many rows as coefficients."""
    high: float | None = None
    note: str = ""


@lru_cache(maxsize=1)
def provenance() -> dict[str, Provenance]:
    """Name of a coefficient -> its value and where it comes from."""
    raw = (files("testbed") / "data" / "published" / "coefficients.json").read_bytes()
    return msgspec.json.decode(raw, type=dict[str, Provenance])


@lru_cache(maxsize=1)
def coefficients() -> Coefficients:
    """The values that the simulator uses. Raises `msgspec.ValidationError` if the file lacks one."""
    return msgspec.convert({name: entry.value for name, entry in provenance().items()}, Coefficients)
