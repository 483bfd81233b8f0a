"""What a reward model learns from pairs of responses to one task, one of them right.

The model gives a number per response, and the chance that the right one is preferred is a logistic function of their
difference (Bradley and Terry 1952; as a reward model's loss Ouyang et al., arXiv 2203.02155, with one pair per
comparison). Only differences are learnt: a constant on all numbers changes nothing. Pure functions; where pairs come
from is another's business."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


def preference_loss(right: Tensor, wrong: Tensor) -> Tensor:
    """-log sigmoid(r_right - r_wrong), [N] of both. Equal rewards give ln 2, a lead of ln 3 gives ln 4/3."""
    return -logsigmoid(right - wrong)
