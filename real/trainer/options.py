"""What a trainer rank is started with. No torch here: the driver reads it too."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from real.errors import RealError
from real.learning.options import LossOptions

Dtype = Literal["float32", "bfloat16", "float16"]
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class TrainerOptions:
    """Picklable; the same for all ranks. Raises `RealError` where a value cannot work."""

    model_path: str
    """A Hugging Face model folder; it is also the reference."""
    device: Device = "cpu"
    """`cpu` talks gloo, `cuda` NCCL. Rank r takes GPU r modulo the GPUs that its process sees."""
    dtype: Dtype = "float32"
    """Of the forward and backward pass, and of the weights that engines get. Master weights, gradient sums and
    optimizer state are float32 always."""
    attn_implementation: str = "sdpa"
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    """Of the whole model over all ranks."""
    max_tokens_per_gpu: int = 4096
    """Tokens of one packed micro-batch; a longer sequence gets a micro-batch of its own. Under `sdpa` attention over a
    row costs its square: with short sequences on a CPU 512 is a good value."""
    temperature: float = 1.0
    """Of sampling: log-probs are those of softmax(logits / temperature)."""
    loss: LossOptions = field(default_factory=LossOptions)
    seed: int = 0
    timeout_s: float = 600.0
    """Of one collective: a rank whose peers have died raises after it at the latest."""

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("device", self.device, get_args(Device)),
            ("dtype", self.dtype, get_args(Dtype)),
        ):
            if value not in choices:
                raise RealError(f"trainer: {name} is {value!r}; it can be {', '.join(choices)}")
        for name in ("lr", "temperature", "max_grad_norm", "max_tokens_per_gpu", "timeout_s"):
            if getattr(self, name) <= 0:
                raise RealError(f"trainer: {name} is {getattr(self, name)}; it must be above 0")
        if not (Path(self.model_path) / "config.json").is_file():
            raise RealError(f"trainer: model_path {self.model_path} is no model folder (it has no config.json)")
