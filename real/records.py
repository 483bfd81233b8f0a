"""The heavy half of experience: token ids, masks, log-probabilities, versions and routed experts of one trajectory.

Responsible for the record that travels from engines and environments to the trainer, and for refusing one whose parts
disagree. It holds no text: a policy loss needs none. It refuses to know the core, engines and losses; the fields
come from several producers (engine, environment, verifier, trainer), each named in the field's text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Span = tuple[int, int, int]
"""(published version, start, end): tokens start .. end-1 counted from the trajectory's first response token."""


class RecordError(ValueError):
    """Parts of a record disagree in length or order."""


@dataclass
class Record:
    """One trajectory of T tokens, the first `prompt_tokens` of which are the task's prompt; R = T - prompt_tokens
    response-side tokens follow (actor tokens and observations)."""

    trajectory: int
    group: int
    task: int
    prompt_tokens: int
    token_ids: NDArray[np.int32]
    """[T]; execution manager: ids as the engine saw and sampled them, never re-tokenised (TITO)."""
    loss_mask: NDArray[np.bool_]
    """[R]; environment: True where the actor chose the token."""
    generation_log_probs: NDArray[np.float32]
    """[R]; engine: log p of each actor token when it was sampled; 0 at masked positions."""
    spans: tuple[Span, ...]
    """Engine: partition of the actor tokens by weight version, in order; indices are response-side."""
    reward: float = 0.0
    """Verifier."""
    finish_reason: str = ""
    """Engine: `stop`, `length`, or a status of the execution manager (`aborted`, `failed`)."""
    old_log_probs: NDArray[np.float32] | None = None
    """[R]; trainer: recomputed with the weights before the update."""
    reference_log_probs: NDArray[np.float32] | None = None
    """[R]; trainer: by the frozen reference."""
    routed_experts: NDArray[np.int32] | None = None
    """[T - 1, layers, top_k]; engine: experts that computed each position (its last token was never an input)."""
    turns: tuple[tuple[int, int], ...] = ()
    """Execution manager: [start, end) of each turn's output, response-side."""
    extra: dict[str, NDArray[Any]] = field(default_factory=dict)
    """Further per-token signals [R], by name (teacher, critic)."""

    @property
    def response_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_tokens

    def check(self) -> Record:
        """Raise `RecordError` if lengths disagree or spans do not partition the actor tokens; else return self."""
        n, who = self.response_tokens, f"record of trajectory {self.trajectory}"
        if n < 0 or self.prompt_tokens < 1:
            raise RecordError(f"{who}: {len(self.token_ids)} tokens with a prompt of {self.prompt_tokens}")
        per_token = {
            "loss_mask": self.loss_mask,
            "generation_log_probs": self.generation_log_probs,
            "old_log_probs": self.old_log_probs,
            "reference_log_probs": self.reference_log_probs,
            **self.extra,
        }
        for name, values in per_token.items():
            if values is not None and len(values) != n:
                raise RecordError(f"{who}: {name} has {len(values)} entries for {n} response tokens")
        if self.routed_experts is not None and len(self.routed_experts) != len(self.token_ids) - 1:
            have, want = len(self.routed_experts), len(self.token_ids) - 1
            raise RecordError(f"{who}: routed_experts has {have} positions, not {want}")
        covered = np.zeros(n, dtype=np.int64)
        for version, start, end in self.spans:
            if not 0 <= start < end <= n or version < 0:
                raise RecordError(f"{who}: span ({version}, {start}, {end}) of {n} response tokens")
            covered[start:end] += 1
        if not np.array_equal(covered, self.loss_mask.astype(np.int64)):
            raise RecordError(f"{who}: version spans do not partition the actor tokens")
        return self
