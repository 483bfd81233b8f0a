"""One trainer rank: a shard of the actor, its optimizer, and the passes over recorded tokens.

Responsible for one optimizer update of the records it is given, together with its peers, and for scoring, snapshots,
checkpoints and offloading. Beside the actor it holds the other roles that were asked for: a critic (trained), the
reference, teachers and a reward model (frozen), each loaded at its first use. It refuses to know groups, batches and
versions (advantages arrive attached to the records) and it has no sampler: tokens are read, never drawn.

One rank lives in one process, since torch's default process group is the process's. Every method but `address` is
collective: all ranks call it, in the same order."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedModel

from real.errors import RealError
from real.garbage import settle
from real.learning.aggregate import Totals, token_weight
from real.learning.corrections import correction_weights, differences
from real.learning.critic import RETURNS, VALUES, value_loss
from real.learning.distillation import TEACHER
from real.learning.kl import kl_estimate
from real.learning.log_probs import chosen_log_probs
from real.learning.losses import policy_loss
from real.learning.quantisation.forward import quantise_forward
from real.learning.ratios import exp_clamped, ratio_counts
from real.learning.replay import RoutingReplay
from real.records import Record
from real.trainer import checkpoint
from real.trainer.model import full_state, load_sharded, load_value_model
from real.trainer.offload import HostCopies
from real.trainer.options import TrainerOptions
from real.trainer.packing import EMPTY_ROW, Row, pack, row_experts
from real.trainer.signals import ADVANTAGES
from real.trainer.stats import CriticStats, Moved, StepStats
from real.trainer.trained import TrainedModel
from testbed.metrics.ratios import BINS, FARTHEST

SUMMED = (
    *("loss", "clipped", "ratio", "mismatch_kl", "reference_kl", "truncated", "masked", "weight", "weight_squared"),
    *("with_old", "engine", "engine_kl", "update", "update_kl"),
    *("with_teacher", "teacher_kl", "teacher_kl_k3"),
)
"""Statistics of an update's tokens that are sums over them; two histograms of ratios follow them in one tensor: the
loss's own, and that of the engine difference."""
SUMS = len(SUMMED) + 2 * BINS


class TrainerRank:
    """Build, `connect` (which loads the actor), then use. `model`, `optimizer` and `options` are for reading."""

    actor: TrainedModel

    def __init__(self, rank: int, world: int, options: TrainerOptions) -> None:
        if options.device == "cuda" and not torch.cuda.is_available():
            raise RealError("trainer: device is cuda, and torch sees no GPU here; device: cpu works everywhere")
        self.rank, self.world, self.options = rank, world, options
        if options.device == "cuda":
            self.device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        else:
            self.device = torch.device("cpu")
        self.dtype: torch.dtype = getattr(torch, options.dtype)
        self.updates = 0
        self._store: dist.Store | None = None
        self._mesh: DeviceMesh | None = None
        self._critic: TrainedModel | None = None
        self._frozen: dict[str, PreTrainedModel] = {}
        self._reward_model: PreTrainedModel | None = None
        self._replay: RoutingReplay | None = None
        self._away: HostCopies | None = None
        self._publisher: Any = None
        torch.manual_seed(options.seed + rank)

    # --- start and end ------------------------------------------------------------------------------------------------

    def address(self) -> tuple[str, int]:
        """Rank 0: where the others meet it. The port is bound here and now, so nobody else can take it."""
        host = _own_address()
        store = dist.TCPStore(host, 0, self.world, is_master=True, wait_for_workers=False, timeout=self._timeout)
        self._store = store
        return host, store.port

    def connect(self, host: str, port: int) -> None:
        """Join the other ranks and load the actor. Models of the same ranks share one world; raises `RealError` if
        this process is in another."""
        if dist.is_initialized():
            here = dist.get_rank(), dist.get_world_size()
            if here != (self.rank, self.world):
                raise RealError(
                    f"trainer: rank {self.rank} of {self.world} is in a process that is rank {here[0]} of {here[1]}; "
                    "a rank needs a process of its own"
                )
        else:
            store = self._store or dist.TCPStore(host, port, self.world, timeout=self._timeout)
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world, timeout=self._timeout)
        self._mesh = init_device_mesh(self.device.type, (self.world,))
        self._load(Path(self.options.model_path))
        if self.options.loss.kl_coef > 0:
            self._net("reference")

    def settle(self) -> None:
        """All that stays is there."""
        settle()

    def shutdown(self) -> None:
        if dist.is_initialized() and self.world > 1:
            dist.destroy_process_group()
        self._store = self._mesh = None

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self.options.timeout_s)

    @property
    def model(self) -> PreTrainedModel:
        return self.actor.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.actor.optimizer

    @property
    def roles(self) -> tuple[str, ...]:
        """The models that are loaded."""
        held = (("critic", self._critic), ("reward_model", self._reward_model))
        return ("actor", *(name for name, model in held if model is not None), *self._frozen)

    @property
    def _devices(self) -> DeviceMesh:
        if self._mesh is None:
            raise RealError("trainer: a rank was used before it was connected")
        return self._mesh

    def _load(self, folder: Path) -> None:
        o = self.options
        model = load_sharded(folder, self._devices, self.dtype, o.attn_implementation, trainable=True)
        if o.quantised is not None:
            quantise_forward(model, o.quantised, o.engine_tp_size)
        self.actor = TrainedModel(model, Path(o.model_path), o, o.lr)
        self._replay = RoutingReplay(model) if o.use_rollout_routing_replay else None

    def _load_critic(self, folder: Path) -> TrainedModel:
        o = self.options
        if o.critic is None:
            raise RealError("trainer: there is no critic; options.critic asks for one")
        model = load_value_model(folder, self._devices, self.dtype, o.attn_implementation, trainable=True)
        return TrainedModel(model, Path(o.critic.model_path or o.model_path), o, o.critic.lr)

    @property
    def critic(self) -> TrainedModel:
        """Loaded at its first use."""
        if self._critic is None:
            start = self.options.critic and self.options.critic.model_path
            self._critic = self._load_critic(Path(start or self.options.model_path))
        return self._critic

    def _net(self, name: str) -> PreTrainedModel:
        """`actor`, `reference` or `teacher:NAME`; the frozen ones are loaded at their first use."""
        if name == "actor":
            return self.model
        o = self.options
        folders = {"reference": o.model_path, **{f"teacher:{t}": folder for t, folder in o.teachers.items()}}
        if name not in folders:
            raise RealError(f"trainer: no model {name!r} has log-probs; there are {', '.join(['actor', *folders])}")
        if name not in self._frozen:
            self._frozen[name] = load_sharded(
                folders[name], self._devices, self.dtype, o.attn_implementation, trainable=False
            )
        return self._frozen[name]

    # --- passes over recorded tokens ----------------------------------------------------------------------------------

    @torch.no_grad()
    def log_probs(self, records: list[Record], model: str = "actor") -> list[NDArray[np.float32]]:
        """log p of every response-side token ([R] each; observations too), by the actor's current weights, the frozen
        `reference` or a frozen `teacher:NAME`; at the sampling temperature all of them. The records stay as they are.
        Only the actor replays recorded experts: they are its own choices."""
        self._require_onloaded()
        net = self._net(model)
        replay = self._replay if model == "actor" else None
        if replay is not None:
            self._require_replayable(records)
        return self._scores(records, net, lambda row: self._forward(net, row, self._replaying(replay, row, records)))

    @torch.no_grad()
    def values(self, records: list[Record]) -> list[NDArray[np.float32]]:
        """The critic's V in the context before every response-side token, [R] each."""
        self._require_onloaded()
        net = self.critic.model
        return self._scores(records, net, lambda row: self._value(net, row))

    @torch.no_grad()
    def rewards(self, records: list[Record]) -> list[float]:
        """What the reward model says of each whole response: its value at the last token. It works while the others are
        offloaded: rewards are asked for while engines generate."""
        if self.options.reward_model is None:
            raise RealError("trainer: there is no reward model; options.reward_model asks for one")
        if self._reward_model is None:
            self._reward_model = load_value_model(
                self.options.reward_model, self._devices, self.dtype, self.options.attn_implementation, trainable=False
            )
        net, found = self._reward_model, [0.0] * len(records)
        for row in self._rows(records, net):
            values, end = self._row_values(net, row), 0
            for i in row.records:
                end += len(records[i].token_ids)
                found[i] = float(values[end - 1])
        return found

    def _scores(
        self, records: list[Record], net: PreTrainedModel, score: Callable[[Row], Tensor]
    ) -> list[NDArray[np.float32]]:
        found: list[NDArray[np.float32]] = [np.zeros(0, np.float32)] * len(records)
        for row in self._rows(records, net):
            values = score(row).cpu().numpy()
            sizes = [records[i].response_tokens for i in row.records]
            for i, part in zip(row.records, np.split(values, np.cumsum(sizes)[:-1]), strict=False):
                found[i] = part.copy()
        return found

    def train_update(self, records: list[Record], batch: int, update: int) -> StepStats:
        """ONE optimizer update from this rank's share of the records. Every denominator counts all ranks' tokens, so
        neither the packing nor the placing of records changes the gradient.

        Raises `RealError`, with the weights untouched, if a record lacks what the loss needs or the gradient is not
        finite."""
        start = time.perf_counter()
        self._require_onloaded()
        for record in records:
            self._require_signals(record)
        self._require_replayable(records)
        actor_tokens = [int(r.loss_mask.sum()) for r in records]
        positions, fallback = self._replayable(records)
        inputs = sum(len(r.token_ids) for r in records)
        counts = self._sum([sum(actor_tokens), sum(n > 0 for n in actor_tokens), inputs, positions, fallback])
        rollouts = self._rollout_tokens(records, actor_tokens)
        totals = Totals(tokens=int(counts[0]), sequences=int(counts[1]), rollouts=len(rollouts))
        loss = self.options.loss
        weights = [
            token_weight(n, totals, loss.aggregation, loss.normal_length, rollouts.get(r.trajectory))
            for n, r in zip(actor_tokens, records, strict=True)
        ]
        mean_weight = self._mean_weight(records)

        sums = torch.zeros(SUMS, dtype=torch.float64, device=self.device)
        rows = self._rows(records, self.model)
        for row in rows:
            # FSDP averages gradients over ranks; the global denominators want their sum.
            log_probs = self._forward(self.model, row, self._replaying(self._replay, row, records))
            members = [records[i] for i in row.records]
            value, parts = self._row_loss(log_probs, members, [weights[i] for i in row.records], mean_weight)
            (value * self.world).backward()
            sums += parts
        grad_norm = self._step(self.actor, batch, update)
        self.updates += 1

        found = self._sum(sums.tolist())
        counts_at = len(SUMMED)
        tokens, summed = max(totals.tokens, 1), dict(zip(SUMMED, found[:counts_at], strict=True))

        def of_those(which: str, name: str) -> float | None:
            return summed[name] / summed[which] if summed[which] else None

        squares = summed["weight_squared"]
        return StepStats(
            batch=batch,
            update=update,
            loss=summed["loss"],
            grad_norm=grad_norm,
            clip_share=summed["clipped"] / tokens,
            mean_ratio=summed["ratio"] / tokens,
            mismatch_kl=summed["mismatch_kl"] / tokens,
            reference_kl=summed["reference_kl"] / tokens,
            truncated_share=summed["truncated"] / tokens,
            masked_share=summed["masked"] / tokens,
            effective_sample_size=summed["weight"] ** 2 / (tokens * squares) if squares else 0.0,
            engine_log_ratio=of_those("with_old", "engine"),
            engine_kl=of_those("with_old", "engine_kl"),
            update_log_ratio=of_those("with_old", "update"),
            update_kl=of_those("with_old", "update_kl"),
            teacher_kl=of_those("with_teacher", "teacher_kl"),
            teacher_kl_k3=of_those("with_teacher", "teacher_kl_k3"),
            sequences=totals.sequences,
            tokens=totals.tokens,
            input_tokens=int(counts[2]),
            micro_batches=len(rows),
            seconds=time.perf_counter() - start,
            replayed_positions=int(counts[3] - counts[4]),
            fallback_positions=int(counts[4]),
            ratio_counts=_by_bin(found[counts_at : counts_at + BINS]),
            engine_ratio_counts=_by_bin(found[counts_at + BINS :]),
        )

    def train_critic(self, records: list[Record], batch: int, update: int) -> CriticStats:
        """ONE optimizer update of the critic towards `extra["returns"]`, bounded around `extra["values"]` (module
        `learning.critic`); the mean over all ranks' actor tokens. The actor is not touched.

        Raises `RealError` like `train_update`."""
        start = time.perf_counter()
        self._require_onloaded()
        critic, options = self.critic, self.options.critic
        assert options is not None
        for record in records:
            for name in (VALUES, RETURNS):
                if name not in record.extra:
                    raise RealError(f"trainer: trajectory {record.trajectory} has no {name}, which the critic needs")
        tokens = self._sum([float(sum(int(r.loss_mask.sum()) for r in records))])[0]
        sums = torch.zeros(6, dtype=torch.float64, device=self.device)
        for row in self._rows(records, critic.model):
            values, members = self._value(critic.model, row), [records[i] for i in row.records]
            loss_sum, parts = self._row_value_loss(values, members, options.value_clip)
            (loss_sum / max(tokens, 1) * self.world).backward()
            sums += parts
        grad_norm = self._step(critic, batch, update)
        loss, clipped, mean, square, error_mean, error_square = (s / max(tokens, 1) for s in self._sum(sums.tolist()))
        variance = square - mean**2
        return CriticStats(
            batch=batch,
            update=update,
            loss=loss,
            grad_norm=grad_norm,
            clip_share=clipped,
            explained_variance=1 - (error_square - error_mean**2) / variance if variance > 1e-12 else 0.0,
            tokens=int(tokens),
            seconds=time.perf_counter() - start,
        )

    def _require_signals(self, record: Record) -> None:
        loss, who = self.options.loss, f"trainer: trajectory {record.trajectory}"
        if ADVANTAGES not in record.extra:
            raise RealError(f"{who} has no advantages; Trainer.train_update attaches them")
        if loss.needs_old_log_probs and record.old_log_probs is None:
            raise RealError(f"{who} has no old log-probs, which denominator {loss.denominator} needs")
        if loss.kl_coef > 0 and record.reference_log_probs is None:
            raise RealError(f"{who} has no reference log-probs, which kl_coef {loss.kl_coef} needs")

    def _rows(self, records: list[Record], model: PreTrainedModel) -> list[Row]:
        """This rank's micro-batches, filled up with empty ones to the count of the rank that has most."""
        vocabulary = model.config.get_text_config().vocab_size
        for record in records:
            if len(record.token_ids) and not 0 <= record.token_ids.min() <= record.token_ids.max() < vocabulary:
                raise RealError(
                    f"trainer: trajectory {record.trajectory} has token id {record.token_ids.max()}; the model's "
                    f"vocabulary has {vocabulary}: tokenizer and model disagree"
                )
        rows = pack(records, self.options.max_tokens_per_gpu)
        most = torch.tensor(len(rows), device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return rows + [EMPTY_ROW] * (int(most) - len(rows))

    def _forward(self, model: PreTrainedModel, row: Row, routing: AbstractContextManager[None]) -> Tensor:
        """[K] float32 log-probs of the row's response tokens; logits of other positions are never made."""
        with routing:
            logits = model(
                input_ids=self._tensor(row.token_ids)[None],
                position_ids=self._tensor(row.position_ids)[None],
                use_cache=False,
                logits_to_keep=self._tensor(row.predictors),
            ).logits[0]
        return chosen_log_probs(logits, self._tensor(row.chosen), self.options.temperature)

    def _value(self, critic: PreTrainedModel, row: Row) -> Tensor:
        """[K] float32: V where each response token of the row was about to be chosen."""
        return self._row_values(critic, row)[self._tensor(row.predictors)].float()

    def _row_values(self, model: PreTrainedModel, row: Row) -> Tensor:
        """[T]: the value head's number at each position of the row."""
        values: Tensor = model(
            input_ids=self._tensor(row.token_ids)[None],
            position_ids=self._tensor(row.position_ids)[None],
            use_cache=False,
        ).logits[0, :, 0]
        return values

    def _replaying(self, replay: RoutingReplay | None, row: Row, records: list[Record]) -> AbstractContextManager[None]:
        if replay is None:
            return nullcontext()
        return replay.playing(self._tensor(row_experts(row, records, replay.layers[-1] + 1, replay.top_k)))

    def _require_replayable(self, records: list[Record]) -> None:
        for record in records:
            if self._replay is not None and record.routed_experts is not None:
                self._replay.check(record.routed_experts, f"trainer: trajectory {record.trajectory}")

    def _replayable(self, records: list[Record]) -> tuple[int, int]:
        """(positions that should run recorded experts, those of them without a record). A sequence's last token is
        none: nothing is predicted from it."""
        if self._replay is None:
            return 0, 0
        positions = [len(r.token_ids) - 1 for r in records]
        missing = [
            n if r.routed_experts is None else self._replay.without_record(r.routed_experts)
            for n, r in zip(positions, records, strict=True)
        ]
        return sum(positions), sum(missing)

    def _rollout_tokens(self, records: list[Record], actor_tokens: list[int]) -> dict[int, int]:
        """Actor tokens of each trajectory over all its records on all ranks, for the one aggregation that asks."""
        found: dict[int, int] = {}
        if self.options.loss.aggregation != "rollout-mean":
            return found
        shares: list[Any] = [None] * self.world
        dist.all_gather_object(shares, [(r.trajectory, n) for r, n in zip(records, actor_tokens, strict=True) if n])
        for trajectory, n in (pair for share in shares for pair in share):
            found[trajectory] = found.get(trajectory, 0) + n
        return found

    def _mean_weight(self, records: list[Record]) -> float | None:
        """Of the update's correction weights, over the tokens that limits leave in; None where they stay."""
        limits = self.options.loss.limits
        if not limits.normalise:
            return None
        total, kept = 0.0, 0.0
        for r in records:
            assert r.old_log_probs is not None
            old, generation = (torch.from_numpy(v[r.loss_mask]) for v in (r.old_log_probs, r.generation_log_probs))
            found = correction_weights(old, generation, torch.zeros(len(old), dtype=torch.long), limits)
            total, kept = total + float(found.weight.sum()), kept + int((~found.masked).sum())
        total, kept = self._sum([total, kept])
        return total / kept if total else 1.0

    def _row_loss(
        self, log_probs: Tensor, records: list[Record], weights: list[float], mean_weight: float | None
    ) -> tuple[Tensor, Tensor]:
        """This row's part of the update's loss, and of its statistics [SUMS]. `log_probs` [K] of the response tokens
        of `records`, in row order."""
        if not records:
            return log_probs.sum(), torch.zeros(SUMS, dtype=torch.float64, device=self.device)
        loss = self.options.loss
        mask = self._tensor(np.concatenate([r.loss_mask for r in records]))

        def joined(of: Callable[[Record], NDArray[Any] | None]) -> Tensor | None:
            values = [v for r in records if (v := of(r)) is not None]
            return self._tensor(np.concatenate(values))[mask] if len(values) == len(records) else None

        current = log_probs[mask]
        generation, advantages = joined(lambda r: r.generation_log_probs), joined(lambda r: r.extra[ADVANTAGES])
        old, sizes = joined(lambda r: r.old_log_probs), [r.response_tokens for r in records]
        weight = self._tensor(np.repeat(weights, sizes).astype(np.float32))[mask]
        sequences = self._tensor(np.repeat(np.arange(len(records)), sizes))[mask]
        assert generation is not None and advantages is not None
        token = policy_loss(current, generation, old, advantages, loss, sequences, mean_weight)
        per_token, reference_kl = token.loss, current.new_zeros(())
        reference = joined(lambda r: r.reference_log_probs)
        if reference is not None:
            penalty = kl_estimate(current, reference, loss.kl_type)
            reference_kl = penalty.detach().sum()
            if loss.kl_coef > 0:
                per_token = per_token + loss.kl_coef * penalty
        value = (weight * per_token).sum()
        now = current.detach()
        parts = [value.detach(), token.clipped, token.ratio, kl_estimate(generation, now), reference_kl]
        parts += [token.truncated, token.masked, token.weight, token.weight.square()]
        engine_counts = torch.zeros(BINS, dtype=torch.float64, device=self.device)
        if old is None:
            parts += [now.new_zeros(())] * 5
        else:
            apart = differences(generation, old, now)
            engine_counts = ratio_counts(exp_clamped(apart.engine))
            parts += [torch.ones_like(now), apart.engine, kl_estimate(generation, old)]
            parts += [apart.update, kl_estimate(old, now)]
        teacher, student = joined(lambda r: r.extra.get(TEACHER)), generation if old is None else old
        if teacher is None:
            parts += [now.new_zeros(())] * 3
        else:
            parts += [torch.ones_like(now), kl_estimate(student, teacher, "k1"), kl_estimate(student, teacher)]
        summed = torch.stack([p.double().sum() for p in parts])
        return value, torch.cat([summed, ratio_counts(token.ratio), engine_counts])

    def _row_value_loss(self, values: Tensor, records: list[Record], value_clip: float | None) -> tuple[Tensor, Tensor]:
        """Sum of the value loss over this row's actor tokens, and of the statistics [6]: loss, clipped tokens, returns,
        their squares, errors of the values before the update, their squares. `values` [K] in row order."""
        if not records:
            return values.sum(), torch.zeros(6, dtype=torch.float64, device=self.device)
        mask, old, returns = (
            self._tensor(np.concatenate(of))
            for of in zip(*((r.loss_mask, r.extra[VALUES], r.extra[RETURNS]) for r in records), strict=True)
        )
        old, returns = old[mask], returns[mask]
        token, error = value_loss(values[mask], old, returns, value_clip), returns - old
        parts = [token.loss.detach(), token.clipped, returns, returns.square(), error, error.square()]
        return token.loss.sum(), torch.stack([p.double().sum() for p in parts])

    def _step(self, trained: TrainedModel, batch: int, update: int) -> float:
        """Returns the norm before clipping."""
        grad_norm = trained.step()
        if not math.isfinite(grad_norm):
            raise RealError(
                f"trainer: gradient norm {grad_norm} in batch {batch}, update {update}; weights are unchanged"
            )
        return grad_norm

    def _tensor(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)

    def _sum(self, values: list[float]) -> list[float]:
        """Each over all ranks."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return tensor.tolist()

    # --- weights ------------------------------------------------------------------------------------------------------

    def full_state(self, everywhere: bool = False) -> dict[str, Tensor] | None:
        """All weights under Hugging Face's names, on the CPU, contiguous, in the options' dtype: a snapshot, which
        later updates do not change. On rank 0 (None elsewhere), or on all."""
        self._require_onloaded()
        return full_state(self.model, self.dtype, keep=everywhere or self.rank == 0)

    @property
    def publisher(self) -> Any:
        """This rank's part in publications, made at its first use."""
        if self._publisher is None:
            from real.weights.publisher import Publisher  # a trainer that publishes nothing does without it

            self._publisher = Publisher(self)
        return self._publisher

    def publish(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.publisher, method)(*args, **kwargs)

    # --- memory -------------------------------------------------------------------------------------------------------

    def offload(self) -> Moved:
        """Parameters and optimizer state of every loaded role but the reward model to host copies; their device memory
        is free. Nothing if they are away already."""
        if self._away is not None:
            return Moved(0, 0.0)
        held = [*self.actor.tensors(), *(self._critic.tensors() if self._critic is not None else ())]
        held += [p.detach() for model in self._frozen.values() for p in model.parameters()]
        self._away = HostCopies(held, self.device)
        return self._away.moved

    def onload(self) -> Moved:
        """Back to the device, bit for bit. Nothing if they are there."""
        away, self._away = self._away, None
        return Moved(0, 0.0) if away is None else away.onload()

    def _require_onloaded(self) -> None:
        if self._away is not None:
            raise RealError("trainer: its weights are offloaded; onload first")

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path, position: dict[str, Any] | None = None) -> None:
        """Write a checkpoint (module `checkpoint`) that appears as a whole or not at all. `position` (JSON) is the
        driver's: where in its data it stands. Ranks on several machines need a shared folder."""
        self._require_onloaded()
        final = Path(folder)
        # Rank 0 says whether the folder can be begun: a refusal on one rank alone would leave the others waiting.
        answer: list[Any] = [None]
        if self.rank == 0:
            try:
                answer[0] = str(checkpoint.begin(final))
            except (RealError, OSError) as error:
                answer[0] = error
        dist.broadcast_object_list(answer, src=0, device=self.device)
        if isinstance(answer[0], Exception):
            raise answer[0]
        temporary, writer = Path(answer[0]), self.rank == 0
        self.actor.write(temporary, writer=writer)
        if self._critic is not None:
            self._critic.write(temporary / checkpoint.CRITIC, writer=writer)
        checkpoint.write_rng(temporary, self.rank, self.device)
        dist.barrier()
        if writer:
            checkpoint.write_state(temporary, {"updates": self.updates, "position": position or {}})
            checkpoint.publish(temporary, final)
        dist.barrier()

    def restore(self, folder: str | Path) -> dict[str, Any]:
        """Continue from a checkpoint, bit for bit where the number of ranks is the same. Returns its position. What was
        offloaded comes back."""
        path = Path(folder)
        state = checkpoint.read_state(path)
        self.onload()
        self._load(path)
        checkpoint.read_optimizer(self.model, self.optimizer, path)
        self._critic = None  # as it was at the checkpoint: there, or not yet loaded
        if (path / checkpoint.CRITIC).is_dir() and self.options.critic is not None:
            self._critic = self._load_critic(path / checkpoint.CRITIC)
            checkpoint.read_optimizer(self._critic.model, self._critic.optimizer, path / checkpoint.CRITIC)
        checkpoint.read_rng(path, self.rank, self.device)
        self.updates = int(state["updates"])
        position: dict[str, Any] = state["position"]
        return position


def _by_bin(counts: list[float]) -> dict[int, int]:
    """Bin -> tokens, of the bins that have any."""
    return {i - FARTHEST: int(n) for i, n in enumerate(counts) if n}


def _own_address() -> str:
    """The address of the interface that leads out of this machine (nothing is sent), or loopback if none does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
