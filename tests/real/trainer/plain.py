"""An independent trainer to compare with: one sequence at a time through transformers, formulas written out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from real.records import Record


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def log_probs(model: PreTrainedModel, record: Record, temperature: float = 1.0) -> Tensor:
    """[R], with gradient."""
    ids = torch.from_numpy(record.token_ids.astype("int64"))
    log_p = torch.log_softmax(model(input_ids=ids[None]).logits[0] / temperature, -1)
    return torch.stack([log_p[t - 1, ids[t]] for t in range(record.prompt_tokens, len(ids))])


def grpo_loss(model: PreTrainedModel, records: Sequence[Record], advantages: Sequence[float]) -> Tensor:
    """Token mean of the clipped loss over generation log-probs, clip 0.2."""
    terms = []
    for record, advantage in zip(records, advantages, strict=True):
        for now, then, counts in zip(
            log_probs(model, record), record.generation_log_probs, record.loss_mask, strict=True
        ):
            if counts:
                ratio = (now - float(then)).exp()
                terms.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
    return torch.stack(terms).mean()
