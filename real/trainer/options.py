"""What a trainer rank is started with. No torch here: the driver reads it too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from real.errors import RealError
from real.learning.options import LossOptions

Dtype = Literal["float32", "bfloat16", "float16"]
Device = Literal["cpu", "cuda"]


Advantage = Literal["group", "critic", "distillation", "group_with_distillation"]
"""The scenario's words (`algorithm.advantage`)."""


@dataclass(frozen=True)
class SignalOptions:
    """What the advantage of a token is made of: read by the facade, which sees whole groups. Names are Miles'."""

    advantage: Advantage = "group"
    """`critic` needs values with the records, `distillation` (no reward) and `group_with_distillation` a teacher's
    log-probs."""
    gamma: float = 1.0
    lambd: float = 1.0
    """Of generalised advantage estimation; 1 and 1 is return minus value."""
    opd_kl_coef: float = 1.0
    """Weight of the teacher's signal."""

    def __post_init__(self) -> None:
        if self.advantage not in get_args(Advantage):
            raise RealError(f"trainer: advantage is {self.advantage!r}; it can be {', '.join(get_args(Advantage))}")
        for name in ("gamma", "lambd"):
            if not 0 <= getattr(self, name) <= 1:
                raise RealError(f"trainer: {name} is {getattr(self, name)}; it must be from 0 to 1")
        if self.opd_kl_coef <= 0:
            raise RealError(f"trainer: opd_kl_coef is {self.opd_kl_coef}; it must be above 0 (1 is the usual value)")


@dataclass(frozen=True)
class CriticOptions:
    """A model of its own with a value head, trained beside the actor."""

    model_path: str | None = None
    """Where its weights start; None: where the actor's do. A folder without a value head gets one that says 0."""
    lr: float = 1e-5
    value_clip: float | None = 0.2
    """A value further than this from what it was before the update pushes no further; None: no bound."""

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise RealError(f"trainer: critic lr is {self.lr}; it must be above 0")
        if self.value_clip is not None and self.value_clip <= 0:
            raise RealError(f"trainer: value_clip is {self.value_clip}; it must be above 0, or null for no bound")
        if self.model_path is not None:
            require_model(self.model_path, "critic model_path")


def require_model(folder: str, what: str) -> None:
    if not (Path(folder) / "config.json").is_file():
        raise RealError(f"trainer: {what} {folder} is no model folder (it has no config.json)")


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
    critic: CriticOptions | None = None
    """None: there is none. It shares the actor's optimizer settings but for its learning rate."""
    teachers: Mapping[str, str] = field(default_factory=dict)
    """Model folder of each teacher by name; one is loaded when it is first asked, and never trained."""
    reward_model: str | None = None
    """Folder of a frozen model with a value head that scores responses, loaded when it is first asked; None: none."""
    use_rollout_routing_replay: bool = False
    """Run the experts that generation recorded (R3), in training and in recomputing old log-probs."""
    quantised: str | None = None
    """Rule by which the actor's forward passes use its weights as engines hold them after requantisation (module
    `learning.quantisation`); None: as they are. Critic, reference and teachers stay as they are."""
    engine_tp_size: int = 1
    """Ranks of one engine: blocks are cut where its shards are."""
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
        require_model(self.model_path, "model_path")
        for name, folder in self.teachers.items():
            require_model(folder, f"teacher {name}'s model folder")
        if self.reward_model is not None:
            require_model(self.reward_model, "reward model's folder")
