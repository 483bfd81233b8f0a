"""One trainer rank: a shard of the actor, its optimizer, and the passes over recorded tokens.

Responsible for one optimizer update of the records it is given, together with its peers, and for scoring, snapshots,
checkpoints and offloading. It refuses to know groups, batches and versions (advantages arrive attached to the records)
and it has no sampler: tokens are read, never drawn.

One rank lives in one process, since torch's default process group is the process's. Every method but `address` is
collective: all ranks call it, in the same order."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable
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
from real.learning.aggregate import Totals, token_weight
from real.learning.kl import kl_estimate
from real.learning.log_probs import chosen_log_probs
from real.learning.losses import policy_loss
from real.records import Record
from real.trainer import checkpoint
from real.trainer.model import full_state, gather, load_sharded
from real.trainer.offload import HostCopies
from real.trainer.options import TrainerOptions
from real.trainer.packing import EMPTY_ROW, Row, pack
from real.trainer.stats import Moved, StepStats

ADVANTAGES = "advantages"
"""Name under `Record.extra` of the advantage of each response token, [R]."""


class TrainerRank:
    """Build, `connect` (which loads the model), then use. Attributes `model` and `options` are for reading."""

    model: PreTrainedModel

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
        self._reference: PreTrainedModel | None = None
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
        """Join the other ranks and load the model. Models of the same ranks share one world; raises `RealError` if
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
            self._load_reference()

    def shutdown(self) -> None:
        if dist.is_initialized() and self.world > 1:
            dist.destroy_process_group()
        self._store = self._mesh = None

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self.options.timeout_s)

    def _load(self, folder: Path) -> None:
        o = self.options
        if self._mesh is None:
            raise RealError("trainer: a rank was used before it was connected")
        self.model = load_sharded(folder, self._mesh, self.dtype, o.attn_implementation, trainable=True)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay
        )

    def _load_reference(self) -> PreTrainedModel:
        if self._reference is None:
            if self._mesh is None:
                raise RealError("trainer: a rank was used before it was connected")
            o = self.options
            self._reference = load_sharded(o.model_path, self._mesh, self.dtype, o.attn_implementation, trainable=False)
        return self._reference

    @property
    def has_reference(self) -> bool:
        return self._reference is not None

    # --- passes over recorded tokens ----------------------------------------------------------------------------------

    @torch.no_grad()
    def log_probs(self, records: list[Record], model: str = "actor") -> list[NDArray[np.float32]]:
        """log p of every response-side token ([R] each; observations too), by the actor's current weights or by the
        frozen reference, which is loaded at its first use. The records stay as they are."""
        self._require_onloaded()
        if model not in ("actor", "reference"):
            raise RealError(f"trainer: no model {model!r}; there are actor and reference")
        net = self.model if model == "actor" else self._load_reference()
        found: list[NDArray[np.float32]] = [np.zeros(0, np.float32)] * len(records)
        for row in self._rows(records):
            values = self._forward(net, row).cpu().numpy()
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
        actor_tokens = [int(r.loss_mask.sum()) for r in records]
        counts = self._sum(
            [sum(actor_tokens), sum(n > 0 for n in actor_tokens), sum(len(r.token_ids) for r in records)]
        )
        totals = Totals(tokens=int(counts[0]), sequences=int(counts[1]))
        loss = self.options.loss
        weights = [token_weight(n, totals, loss.aggregation, loss.normal_length) for n in actor_tokens]

        sums = torch.zeros(5, dtype=torch.float64, device=self.device)
        rows = self._rows(records)
        for row in rows:
            # FSDP averages gradients over ranks; the global denominators want their sum.
            value, parts = self._row_loss(row, [records[i] for i in row.records], [weights[i] for i in row.records])
            (value * self.world).backward()
            sums += parts
        grad_norm = self._step(batch, update)

        tokens = max(totals.tokens, 1)
        total, *means = self._sum(sums.tolist())
        clip_share, mean_ratio, mismatch_kl, reference_kl = (m / tokens for m in means)
        return StepStats(
            batch=batch,
            update=update,
            loss=total,
            grad_norm=grad_norm,
            clip_share=clip_share,
            mean_ratio=mean_ratio,
            mismatch_kl=mismatch_kl,
            reference_kl=reference_kl,
            sequences=totals.sequences,
            tokens=totals.tokens,
            input_tokens=int(counts[2]),
            micro_batches=len(rows),
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

    def _rows(self, records: list[Record]) -> list[Row]:
        """This rank's micro-batches, filled up with empty ones to the count of the rank that has most."""
        vocabulary = self.model.config.get_text_config().vocab_size
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

    def _forward(self, model: PreTrainedModel, row: Row) -> Tensor:
        """[K] float32 log-probs of the row's response tokens; logits of other positions are never made."""
        logits = model(
            input_ids=self._tensor(row.token_ids)[None],
            position_ids=self._tensor(row.position_ids)[None],
            use_cache=False,
            logits_to_keep=self._tensor(row.predictors),
        ).logits[0]
        return chosen_log_probs(logits, self._tensor(row.chosen), self.options.temperature)

    def _row_loss(self, row: Row, records: list[Record], weights: list[float]) -> tuple[Tensor, Tensor]:
        """This row's part of the update's loss, and of the sums [5] of the statistics: loss, clipped tokens, ratios,
        mismatch KL, reference KL."""
        log_probs = self._forward(self.model, row)
        if not records:
            return log_probs.sum(), torch.zeros(5, dtype=torch.float64, device=self.device)
        loss = self.options.loss
        mask = self._tensor(np.concatenate([r.loss_mask for r in records]))

        def joined(of: Callable[[Record], NDArray[Any] | None]) -> Tensor | None:
            values = [v for r in records if (v := of(r)) is not None]
            return self._tensor(np.concatenate(values))[mask] if len(values) == len(records) else None

        current = log_probs[mask]
        generation, advantages = joined(lambda r: r.generation_log_probs), joined(lambda r: r.extra[ADVANTAGES])
        weight = self._tensor(np.repeat(weights, [r.response_tokens for r in records]).astype(np.float32))[mask]
        assert generation is not None and advantages is not None
        token = policy_loss(current, generation, joined(lambda r: r.old_log_probs), advantages, loss)
        per_token, reference_kl = token.loss, current.new_zeros(())
        reference = joined(lambda r: r.reference_log_probs)
        if reference is not None:
            penalty = kl_estimate(current, reference, loss.kl_type)
            reference_kl = penalty.detach().sum()
            if loss.kl_coef > 0:
                per_token = per_token + loss.kl_coef * penalty
        value = (weight * per_token).sum()
        mismatch = kl_estimate(generation, current.detach())
        parts = [value.detach(), token.clipped.sum(), token.ratio.sum(), mismatch.sum(), reference_kl]
        return value, torch.stack([p.double() for p in parts])

    def _step(self, batch: int, update: int) -> float:
        """Clip by the norm over all ranks' shards, and update. Returns the norm before clipping."""
        parameters = list(self.model.parameters())
        grads = [p.grad for p in parameters if p.grad is not None]
        norm = gather(torch.nn.utils.get_total_norm(grads))
        grad_norm = float(norm)
        if math.isfinite(grad_norm):
            torch.nn.utils.clip_grads_with_norm_(parameters, self.options.max_grad_norm, norm)
            self.optimizer.step()
            self.updates += 1
        self.optimizer.zero_grad()
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
        """Parameters, reference and optimizer state to host copies; their device memory is free. Nothing if they are
        away already."""
        if self._away is not None:
            return Moved(0, 0.0)
        held = [p.detach() for m in (self.model, self._reference) if m is not None for p in m.parameters()]
        held += [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
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
        checkpoint.write_weights(
            self.model, Path(self.options.model_path), temporary, self.options.dtype, writer=writer
        )
        checkpoint.write_optimizer(self.model, self.optimizer, temporary, writer=writer)
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
        checkpoint.read_rng(path, self.rank, self.device)
        self.updates = int(state["updates"])
        position: dict[str, Any] = state["position"]
        return position


def _own_address() -> str:
    """The address of the interface that leads out of this machine (nothing is sent), or loopback if none does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
