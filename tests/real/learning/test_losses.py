"""Policy losses against the numbers of the seeds, and against signs worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from real.learning.losses import cispo, importance, policy_gradient, policy_loss, ppo_clip
from real.learning.options import LIMITS, LossOptions, WeightLimits
from real.learning.ratios import probability_ratio, sequence_ratio


def log(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def gradient(ratio: float, advantage: float, low: float = 0.2, high: float = 0.2, dual: float | None = None) -> float:
    """d loss / d log p at this ratio."""
    z = log(ratio * 0.5).requires_grad_()
    ppo_clip(probability_ratio(z, log(0.5)), torch.tensor([advantage]), low, high, dual).loss.sum().backward()
    assert z.grad is not None
    return float(z.grad)


def test_lm_07_gradient_of_the_simplest_loss() -> None:
    z = log(0.5).requires_grad_()
    loss = policy_gradient(z, torch.tensor([1 - 0.4]))
    loss.sum().backward()
    assert loss.item() == pytest.approx(-0.6 * math.log(0.5))
    assert z.grad is not None
    assert z.grad.item() == pytest.approx(-0.6)


def test_lm_08_advantage_and_denominator_are_constants() -> None:
    advantage = torch.tensor([0.6], requires_grad=True)
    old = log(0.5).requires_grad_()
    current = log(0.55).requires_grad_()
    ratio = probability_ratio(current, old)
    losses = (
        policy_gradient(current, advantage),
        importance(ratio, advantage),
        ppo_clip(ratio, advantage, 0.2, 0.2, 3.0).loss,
        ppo_clip(sequence_ratio(current, old, torch.tensor([0])), advantage, 0.2, 0.2).loss,
        cispo(current, ratio, advantage, 0.2, 0.2).loss,
    )
    torch.stack(losses).sum().backward()
    assert advantage.grad is None
    assert old.grad is None
    assert current.grad is not None


@pytest.mark.parametrize(("advantage", "rises"), [(0.6, True), (-0.6, False)])
def test_lm_09_the_sign_moves_an_isolated_choice(advantage: float, rises: bool) -> None:
    logits = torch.zeros(4, requires_grad=True)
    policy_gradient(logits.log_softmax(-1)[:1], torch.tensor([advantage])).sum().backward()
    assert logits.grad is not None
    moved = (logits - 0.1 * logits.grad).softmax(-1)[0].item()
    assert (moved > 0.25) == rises


def test_lm_10_shared_weights_may_move_a_token_against_its_own_signal() -> None:
    # One weight makes both choices likelier. The second token has a positive advantage, and still falls: the first
    # one's negative signal is stronger. This is allowed.
    w = torch.zeros(1, requires_grad=True)
    z = torch.nn.functional.logsigmoid(torch.stack([3 * w, w])).squeeze(-1)
    policy_gradient(z, torch.tensor([-1.0, 0.5])).sum().backward()
    assert w.grad is not None
    moved = torch.sigmoid(w - 0.1 * w.grad).item()
    assert moved < 0.5


def test_lm_12_clipping_stops_what_has_moved_enough() -> None:
    assert gradient(1.3, +1.0) == 0
    assert gradient(0.7, -1.0) == 0
    assert gradient(0.7, +1.0) == pytest.approx(-0.7)  # d(-r A)/dz = -r A
    assert gradient(1.3, -1.0) == pytest.approx(1.3)
    assert gradient(1.1, +1.0) == pytest.approx(-1.1)
    on_the_bound = ppo_clip(probability_ratio(log(0.6), log(0.5)), torch.tensor([1.0]), 0.2, 0.2)
    assert on_the_bound.loss.item() == pytest.approx(-1.2)


def test_lm_12_clip_higher_moves_only_the_upper_bound() -> None:
    assert gradient(1.25, +1.0, high=0.28) == pytest.approx(-1.25)
    assert gradient(1.29, +1.0, high=0.28) == 0
    assert gradient(0.79, -1.0, high=0.28) == 0


def test_lm_12_clipped_counts_the_stopped_tokens_only() -> None:
    ratio = torch.tensor([1.3, 0.7, 1.3, 0.7, 1.0])
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0])
    assert ppo_clip(ratio, advantages, 0.2, 0.2).clipped.tolist() == [True, True, False, False, False]


def test_lm_12_dual_clip_bounds_the_loss_of_an_unwanted_choice() -> None:
    """A = -1 and r = 5: the loss is 5 without, 3 with c = 3, where its gradient ends; A = +1 is left alone."""
    assert gradient(5.0, -1.0) == pytest.approx(5.0)
    assert gradient(5.0, -1.0, dual=3.0) == 0
    assert gradient(2.9, -1.0, dual=3.0) == pytest.approx(2.9)
    assert gradient(0.5, +1.0, dual=3.0) == pytest.approx(-0.5)
    found = ppo_clip(torch.tensor([5.0, 5.0, 2.9]), torch.tensor([-1.0, 1.0, -1.0]), 0.2, 0.2, dual=3.0)
    assert found.loss.tolist() == pytest.approx([3.0, -1.2, 2.9])
    assert found.clipped.tolist() == [True, True, False]


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    """-clip(r) A d log p: ratios 3, 1.1, 0.1 within (0.8, 1.2) count 1.2, 1.1, 0.8."""
    z = log(0.9, 0.55, 0.02).requires_grad_()
    found = cispo(z, probability_ratio(z, log(0.3, 0.5, 0.2)), torch.tensor([1.0, 1.0, -2.0]), 0.2, 0.2)
    found.loss.sum().backward()
    assert z.grad is not None
    assert z.grad.tolist() == pytest.approx([-1.2, -1.1, 1.6])
    assert found.loss.tolist() == pytest.approx([-1.2 * math.log(0.9), -1.1 * math.log(0.55), 1.6 * math.log(0.02)])
    assert found.clipped.tolist() == [True, False, True]


def test_gspo_clips_whole_sequences() -> None:
    """Sequence ratios sqrt(1.5 * 1.5 / 2.25 * 1.44) = 1.2 and 1.0001 under GSPO's bounds 3e-4 and 4e-4, A = +1: the
    first stops with every token, although one of them fell; the second pushes with s on each."""
    ratios = torch.tensor([1.6, 0.9, 1.0003, 0.9999], dtype=torch.float64)
    old = log(0.3, 0.3, 0.3, 0.3)
    z = (old + ratios.log()).requires_grad_()
    options = LossOptions(loss_type="gspo", denominator="recomputed", eps_clip=3e-4, eps_clip_high=4e-4)
    found = policy_loss(z, old, old, torch.ones(4, dtype=torch.float64), options, torch.tensor([0, 0, 1, 1]))
    s = [math.sqrt(1.6 * 0.9)] * 2 + [math.sqrt(1.0003 * 0.9999)] * 2
    assert found.ratio.tolist() == pytest.approx(s)
    assert found.loss.tolist() == pytest.approx([-1.0004] * 2 + [-s[2]] * 2)
    assert found.clipped.tolist() == [True, True, False, False]
    found.loss.sum().backward()
    assert z.grad is not None
    assert z.grad.tolist() == pytest.approx([0, 0, -s[2], -s[2]])


@pytest.mark.parametrize(
    ("denominator", "ratio", "weight"),
    [("generation", 0.60 / 0.50, 1.0), ("recomputed", 0.60 / 0.52, 1.0), ("decoupled", 0.60 / 0.52, 0.52 / 0.50)],
)
def test_er_07_the_denominator_is_configuration(denominator: str, ratio: float, weight: float) -> None:
    options = LossOptions(denominator=denominator, eps_clip=0.25)  # type: ignore[arg-type]
    found = policy_loss(log(0.60), log(0.50), log(0.52), torch.tensor([1.0]), options)
    assert found.ratio.item() == pytest.approx(ratio)
    assert found.loss.item() == pytest.approx(-ratio * weight)


def test_qm_13_decoupled_weight_stays_outside_the_clip() -> None:
    """Behaviour 0.50, proximal 0.52, current 0.60: 1.04 times 1.1538. With a bound of 0.1 the ratio is clipped and the
    weight is not."""
    wide = LossOptions(denominator="decoupled")
    found = policy_loss(log(0.60), log(0.50), log(0.52), torch.tensor([1.0]), wide)
    assert (found.weight.item(), found.ratio.item()) == pytest.approx((1.04, 0.60 / 0.52))
    assert found.ratio.item() == pytest.approx(1.1538, abs=5e-5)
    assert found.loss.item() == pytest.approx(-1.2)
    assert not found.clipped.item()
    narrow = policy_loss(
        log(0.60), log(0.50), log(0.52), torch.tensor([1.0]), LossOptions(denominator="decoupled", eps_clip=0.1)
    )
    assert narrow.loss.item() == pytest.approx(-1.04 * 1.1)
    assert narrow.clipped.item()


# --- against a written-out gradient -----------------------------------------------------------------------------------


def weight_of_the_gradient(ratio: float, advantage: float, loss_type: str, low: float, high: float) -> float:
    """-d loss / d log p of one token, case by case."""
    if loss_type == "policy_gradient":
        return advantage
    if loss_type == "importance":
        return ratio * advantage
    if loss_type == "cispo":
        return min(max(ratio, 1 - low), 1 + high) * advantage
    stopped = ratio > 1 + high if advantage > 0 else ratio < 1 - low
    return 0.0 if stopped else ratio * advantage


def corrects(loss_type: str, denominator: str) -> bool:
    return denominator == "decoupled" or (denominator == "generation" and loss_type != "policy_gradient")


COMBINATIONS = [
    (loss_type, denominator, action)
    for loss_type in ("policy_gradient", "importance", "ppo_clip", "gspo", "cispo")
    for denominator in ("generation", "recomputed", "decoupled")
    for action in ("none", "truncate", "mask")
    if action != "truncate" or corrects(loss_type, denominator)  # else refused: there is nothing to truncate
]


@pytest.mark.parametrize(("loss_type", "denominator", "action"), COMBINATIONS)
def test_qm_04_and_lm_12_every_combination_on_a_table_of_logits(loss_type: str, denominator: str, action: str) -> None:
    """Five contexts, four tokens, a softmax table in float64: d loss / d logits = -c (onehot - p) with c written out
    per token, and one sequence of three choices, one of two."""
    own = "geometric" if loss_type == "gspo" and denominator == "generation" else "token"
    limits = WeightLimits(action, own, None if action == "none" else (0.7, 1.15))  # type: ignore[arg-type]
    options = LossOptions(
        loss_type=loss_type,  # type: ignore[arg-type]
        denominator=denominator,  # type: ignore[arg-type]
        limits=limits,
        eps_clip=0.15,
        eps_clip_high=0.25,
    )
    rng = torch.Generator().manual_seed(3)
    logits = torch.randn(5, 4, generator=rng, dtype=torch.float64).requires_grad_()
    chosen, sequences = torch.tensor([0, 3, 1, 2, 2]), torch.tensor([0, 0, 0, 1, 1])
    current = logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0]
    old = current.detach() + torch.tensor([0.3, -0.3, 0.1, -0.2, 0.0], dtype=torch.float64)
    generation = old + torch.tensor([0.1, 0.5, -0.4, -0.05, -0.6], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 0.5], dtype=torch.float64)

    p = logits.detach().softmax(-1).tolist()
    now, before, engine = (x.tolist() for x in (current.detach(), old, generation))
    groups = [[0, 1, 2], [3, 4]]

    def ratios(above: list[float], below: list[float], geometric: bool) -> list[float]:
        differences = [a - b for a, b in zip(above, below, strict=True)]
        if geometric:
            differences = [sum(differences[i] for i in g) / len(g) for g in groups for _ in g]
        return [math.exp(d) for d in differences]

    updates = ratios(now, engine if denominator == "generation" else before, loss_type == "gspo")
    weights = ratios(now if denominator == "generation" else before, engine, own == "geometric")
    expected = torch.zeros(5, 4, dtype=torch.float64)
    for k in range(5):
        kept = not (action == "mask" and not 0.7 <= weights[k] <= 1.15)
        limited = min(max(weights[k], 0.7), 1.15) if action == "truncate" else weights[k]
        ratio, outer = updates[k], 1.0
        if denominator == "generation" and corrects(loss_type, denominator):
            ratio = limited
        elif denominator == "decoupled":
            outer = limited
        c = kept * outer * weight_of_the_gradient(ratio, advantages[k].item(), loss_type, 0.15, 0.25)
        for j in range(4):
            expected[k, j] = -c * ((1.0 if j == chosen[k] else 0.0) - p[k][j])

    policy_loss(current, generation, old, advantages, options, sequences).loss.sum().backward()
    assert logits.grad is not None
    assert logits.grad.numpy() == pytest.approx(expected.numpy(), abs=1e-12)


def test_masked_tokens_are_not_counted_as_clipped() -> None:
    options = LossOptions(denominator="decoupled", limits=LIMITS["icepop"])
    found = policy_loss(log(0.9, 0.9), log(0.01, 0.3), log(0.3, 0.3), torch.tensor([1.0, 1.0]), options)
    assert found.masked.tolist() == [True, False]
    assert found.clipped.tolist() == [False, True]
    assert found.loss.tolist() == pytest.approx([0, -1.2])


def test_a_denominator_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="without old log-probs"):
        policy_loss(log(0.6), log(0.5), None, torch.tensor([1.0]), LossOptions(denominator="recomputed"))
