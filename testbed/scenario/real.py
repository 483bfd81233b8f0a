"""What only a run on real engines and trainers needs: devices, processes, optimizer, loss and sampling.

The simulated backend reads nothing here. Names are those of SGLang, Miles and slime where they have one."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from testbed.scenario.base import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section


class Optimizer(Section):
    """AdamW with a global gradient-norm limit."""

    lr: PositiveFloat = 1e-5
    adam_beta1: Fraction = 0.9
    adam_beta2: Fraction = 0.98
    adam_eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    clip_grad: PositiveFloat = 1.0


class PolicyLoss(Section):
    """What a policy update minimises: ratio, clip, correction, and what advantages are made of."""

    loss_type: Literal["policy_gradient", "importance", "ppo_clip", "gspo", "cispo"] = "ppo_clip"
    eps_clip: PositiveFloat = 0.2
    eps_clip_high: PositiveFloat | None = None
    """null: as `eps_clip`."""
    eps_clip_c: Annotated[float, Field(gt=1)] | None = None
    """Dual clip; null: none."""
    advantage_std: Literal["population", "sample", "none", "leave_one_out"] = "population"
    """What a group's centred rewards are divided by."""
    loss_aggregation: Literal[
        "token-mean",
        "token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum",
        "seq-mean-token-sum-norm",
        "rollout-mean",
    ] = "token-mean"
    normal_length: PositiveInt | None = None
    """Tokens by which `seq-mean-token-sum-norm` divides each sequence's sum, whatever its length (Dr.GRPO); only there.
    """
    denominator: Literal["generation", "recomputed", "decoupled"] = "generation"
    """Log-probabilities in the ratio's denominator: the engine's when sampled, the trainer's own before the update,
    or both (AReaL's decoupled loss). All but `generation` need `algorithm.recompute_old_log_probs`."""
    mismatch: Literal["none", "tis", "mis", "icepop", "seq_mask_tis"] = "none"
    """What is done about tokens on which engine and trainer disagree: truncated or masked importance sampling, IcePop's
    band, a sequence filter before truncation. The truncating ones need a correction: `denominator: decoupled`."""
    kl_loss_type: Literal["k1", "k2", "k3"] = "k3"
    gamma: Fraction = 1.0
    lambd: Fraction = 1.0
    """Of generalised advantage estimation (`algorithm.advantage: critic`)."""
    opd_kl_coef: PositiveFloat = 1.0
    """Weight of a teacher's signal (`distillation`, `group_with_distillation`)."""


class Critic(Section):
    """The critic of `algorithm.advantage: critic`: a model of its own with a value head, starting from the actor."""

    lr: PositiveFloat = 1e-5
    value_clip: PositiveFloat | None = 0.2


class Warmup(Section):
    """A short supervised stage on the environment's own answers before the first rollout, cached.

    It ends as soon as sampled answers are right with probability `target`: groups then hold both rewards.
    """

    steps: NonNegativeInt = 0
    """At most; 0: no warm-up."""
    target: Annotated[float, Field(gt=0, lt=1)] = 0.45
    batch_size: PositiveInt = 64
    lr: PositiveFloat = 1e-3


Teacher = str | Warmup


class Real(Section):
    """Options of the real backend alone."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: CUDA where there is one."""
    temperature: PositiveFloat = 1.0
    optimizer: Optimizer = Optimizer()
    loss: PolicyLoss = PolicyLoss()
    critic: Critic = Critic()
    teachers: tuple[Teacher, ...] | dict[str, Teacher] = ()
    """Model folders, relative to the scenario file, or warm-ups: the scenario's model after one of its own. A list:
    task i is taught by teacher i modulo their number. A mapping: kind of task (a mixture's part, else the environment's
    type) -> its teacher. Empty: the start model teaches."""
    reward_model: str | None = None
    """Folder of a model with a value head that scores responses, relative to the scenario file; null: the environment's
    verifier does. Its weights never change."""
    use_rollout_routing_replay: bool = False
    """Train with the experts that generation recorded (R3); models with experts only."""
    warmup: Warmup = Warmup()
    eval_tasks: PositiveInt | None = None
    """Tasks of another stream that the model answers before the first batch and after the last, one response each,
    for the report; null: none. Nothing of it counts as time of the run."""
    save_interval: PositiveInt | None = None
    """Batches between two checkpoints in the run folder; null: none."""
    load: str | None = None
    """A checkpoint to go on from, relative to the scenario file: weights, optimizer, and place in the tasks."""
    engine_command: tuple[str, ...] = ()
    """Command that starts a server, for engines in an environment of their own; empty: this Python and
    `-m sglang.launch_server`."""
    engine_args: tuple[str, ...] = ()
    """More server arguments."""
    ray_address: str | None = None
    """A running Ray cluster; null: one is started for the run."""
    oversubscribe: bool = False
    """Several roles may use one GPU at once (a check on a machine with fewer GPUs than the scenario has)."""
    start_timeout_s: PositiveFloat = 300.0
    request_timeout_s: PositiveFloat = 600.0
    watchdog_s: Annotated[float, Field(gt=0)] = 300.0
    """A run in which work is queued and nothing finishes for this long is ended with a message."""
