"""Routing replay on one of transformers' MoE blocks, against sums over experts that are written out here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from real.errors import RealError
from real.learning.replay import RoutingReplay, replayed_gates, routing_bytes

EXPERTS, TOP_K, HIDDEN = 4, 2, 6
E1, E2, E3 = 1, 2, 3


class OneLayer(nn.Module):
    """A model as far as replay sees it: a router under `layers.0`."""

    def __init__(self, norm_topk_prob: bool = True) -> None:
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

        super().__init__()
        config = Qwen3MoeConfig(
            hidden_size=HIDDEN,
            moe_intermediate_size=5,
            num_experts=EXPERTS,
            num_experts_per_tok=TOP_K,
            norm_topk_prob=norm_topk_prob,
        )
        config._experts_implementation = "eager"
        layer = nn.Module()
        layer.mlp = Qwen3MoeSparseMoeBlock(config)
        self.layers = nn.ModuleList([layer])
        generator = torch.Generator().manual_seed(3)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        self.executed: list[list[int]] = []
        """Experts of each position of the last pass, sorted."""
        self.mlp.experts.register_forward_pre_hook(self._note)

    @property
    def mlp(self) -> Any:
        return self.layers[0].mlp

    def _note(self, _: Any, args: tuple[Tensor, Tensor, Tensor]) -> None:
        self.executed = [sorted(row) for row in args[1].tolist()]

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x[None])[0]

    def expert(self, i: int, x: Tensor) -> Tensor:
        """Written out: down(silu(gate x) * up x)."""
        gate, up = (self.mlp.experts.gate_up_proj[i] @ x).chunk(2)
        return self.mlp.experts.down_proj[i] @ (gate * torch.sigmoid(gate) * up)

    def mixture(self, chosen: list[int], x: Tensor) -> Tensor:
        """Written out: softmax over the chosen experts' logits, now."""
        logits = self.mlp.gate.weight @ x
        powers = {i: logits[i].exp() for i in chosen}
        return sum(powers[i] / sum(powers.values()) * self.expert(i, x) for i in chosen)  # type: ignore[return-value]


def close(a: Tensor, b: Tensor) -> bool:
    """To what gates in float32 allow (transformers makes them so whatever the model's dtype)."""
    return bool((a - b).abs().max() <= 1e-5 * b.abs().max())


@pytest.fixture
def model() -> OneLayer:
    return OneLayer()


@pytest.fixture
def x(model: OneLayer) -> Tensor:
    """Three positions at which the router likes E3 best and E1 least."""
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    x[:, 0] = 1
    model.mlp.gate.weight.data *= 0.2
    model.mlp.gate.weight.data[:, 0] = torch.tensor([1.0, -1.0, 0.0, 3.0], dtype=torch.float64)
    return x


def recorded(*experts: list[int]) -> Tensor:
    """[positions, one layer, top_k]"""
    return torch.tensor(experts)[:, None]


def test_er_15_recorded_experts_run_with_current_weights(model: OneLayer, x: Tensor) -> None:
    replay = RoutingReplay(model)
    free = model(x)
    assert all(E3 in row and E1 not in row for row in model.executed), "by itself the router takes E3"
    with replay.playing(recorded([E1, E2], [E2, E1], [E1, E2])):
        out = model(x)
    assert model.executed == [[E1, E2]] * 3
    for position in range(3):
        assert close(out[position], model.mixture([E1, E2], x[position]))
    # Only the choice is from the record: the trainer's weights of E1 count, those of E3 do not.
    with torch.no_grad(), replay.playing(recorded(*[[E1, E2]] * 3)):
        model.mlp.experts.down_proj[E3] *= 2
        assert close(model(x), out)
        model.mlp.experts.down_proj[E1] *= 2
        moved = model(x)
    assert not close(moved, out)
    assert close(moved[0], model.mixture([E1, E2], x[0]))
    # Replay off: E3 again.
    model(x)
    assert all(E3 in row for row in model.executed)
    assert not close(free, out)


def test_er_16_gates_are_of_the_training_router_and_its_gradient_flows(model: OneLayer, x: Tensor) -> None:
    replay = RoutingReplay(model)
    direction = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    with replay.playing(recorded(*[[E1, E2]] * 3)):
        (model(x) @ direction).sum().backward()
    found = model.mlp.gate.weight.grad
    assert found is not None
    model.zero_grad()
    torch.stack([model.mixture([E1, E2], row) @ direction for row in x]).sum().backward()
    expected = model.mlp.gate.weight.grad
    assert expected is not None and expected[[E1, E2]].abs().min() > 1e-9
    assert close(found, expected)
    assert found[[0, E3]].abs().max() == 0, "experts that did not run have no say in the gates"


def test_positions_without_a_record_are_routed_by_the_model(model: OneLayer, x: Tensor) -> None:
    replay = RoutingReplay(model)
    own, alone = model(x), model.executed
    with replay.playing(recorded([E1, E2], [-1, -1], [E1, -1])):
        out = model(x)
    assert model.executed == [[E1, E2], alone[1], alone[2]]
    assert close(out[1:], own[1:])
    record = np.array([[E1, E2], [-1, -1], [E1, -1]], dtype=np.int32)[:, None]
    assert replay.without_record(record) == 2


def test_the_models_own_choice_replayed_changes_nothing(model: OneLayer, x: Tensor) -> None:
    replay, own = RoutingReplay(model), model(x)
    with replay.playing(recorded(*model.executed)):
        assert close(model(x), own)


def test_gates_of_a_model_that_does_not_normalise_them() -> None:
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]], dtype=torch.float64).log()
    experts = torch.tensor([[E1, E2]])
    assert replayed_gates(logits, experts, norm_topk_prob=False)[0].tolist() == pytest.approx([0.2, 0.3])
    assert replayed_gates(logits, experts, norm_topk_prob=True)[0].tolist() == pytest.approx([0.4, 0.6])


def test_er_17_size_of_a_routing_record() -> None:
    assert routing_bytes(32_768, 60, 8) == 62_912_640
    assert routing_bytes(32_768, 60, 8) / 2**20 == pytest.approx(60.0, abs=0.01)
    assert routing_bytes(11, 2, 2) == np.zeros((10, 2, 2), np.int32).nbytes


def test_a_record_of_another_model_is_refused(model: OneLayer) -> None:
    replay = RoutingReplay(model)
    replay.check(np.array([[[E1, E2]], [[-1, -1]]], dtype=np.int32), "t")
    for record, says in (
        (np.zeros((2, 1, 3), np.int32), "t: routed experts of 1 layers and top 3"),
        (np.zeros((2, 0, 2), np.int32), "experts in layer 0 and top 2: another model generated it"),
        (np.array([[[E1, 4]]], np.int32), "must be 2 different ones of 4"),
        (np.array([[[E1, E1]]], np.int32), "must be 2 different ones of 4"),
    ):
        with pytest.raises(RealError, match=says):
            replay.check(record, "t")


def test_a_model_without_experts_has_nothing_to_replay() -> None:
    with pytest.raises(RealError, match="Linear has no router that can be replayed"):
        RoutingReplay(nn.Linear(2, 2))


def test_removed_hooks_leave_the_model_alone(model: OneLayer, x: Tensor) -> None:
    replay, own = RoutingReplay(model), model(x)
    replay.remove()
    with replay.playing(recorded(*[[E1, E2]] * 3)):
        assert torch.equal(model(x), own)
