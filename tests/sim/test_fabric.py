"""Links against D/D/1, and weight paths against published updates and the properties of a publication."""

from __future__ import annotations

from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.coefficients import coefficients
from sim.fabric import Fabric, Link, link_bytes_per_s
from sim.weight_paths import WeightPaths
from testbed.scenario.catalogue import ModelSpec, gpu_spec, model_preset, model_spec
from testbed.scenario.layout import layout_of
from testbed.scenario.scenario import Scenario
from testbed.scenario.study import load_study
from tests.support.scenarios import scenario

PATHS = ("broadcast", "p2p", "disk", "disk_delta")
GIB = 2**30
COEFFICIENTS = coefficients()


def of_size(params: float) -> ModelSpec:
    """A dense model that has this many parameters and next to no tensors."""
    return ModelSpec("of size", 1, 1, 1, 1, 1, int((params - 8) / 3), 1, True)


def paths(s: Scenario, model: ModelSpec) -> WeightPaths:
    return WeightPaths(s, layout_of(s), model, gpu_spec(s.cluster.gpu))


def split(train_nodes: int, engine_nodes: int, per_engine: int, **changes: Any) -> Scenario:
    base: dict[str, Any] = {
        "cluster": {"gpu": "H100", "nodes": train_nodes + engine_nodes, "gpus_per_node": 8},
        "placement": {
            "mode": "disaggregated",
            "rollout_num_gpus": 8 * engine_nodes,
            "actor_num_gpus": 8 * train_nodes,
            "rollout_num_gpus_per_engine": per_engine,
        },
        "training": {"tensor_parallel": 4, "sharding": "zero1"},
        "weights__update_weight_buffer_size": GIB,
    }
    return scenario(**{**base, **changes})


# --- links ------------------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 60))
def test_a_link_is_d_d_1(service: int, gap: int, count: int) -> None:
    """The n-th job waits n (S - A) if S > A, else not at all: exact in whole numbers."""
    link = Link("test", 1.0)
    for n in range(count):
        start, end = link.reserve(n * gap, service)
        assert start - n * gap == n * max(0, service - gap)
        assert end - start == service
    assert link.busy_s == count * service
    assert link.waited_s == sum(n * max(0, service - gap) for n in range(count))
    assert link.utilisation(link.free_at) == link.busy_s / link.free_at
    assert link.transfers == count and link.bytes == count * service


def test_a_link_adds_its_latency_and_needs_bandwidth() -> None:
    assert Link("test", 100.0, 0.5).reserve(1.0, 50) == (1.0, 2.0)
    with pytest.raises(ValueError, match="bandwidth"):
        Link("test", 0.0)


def test_rates_come_from_the_cluster_or_else_the_catalogue() -> None:
    s = scenario(cluster={"gpu": "H100", "nodes": 1, "gpus_per_node": 4, "links": {"ib_gb_per_s": 20}})
    assert link_bytes_per_s(s.cluster, gpu_spec("H100"), "ib") == 20e9
    assert link_bytes_per_s(s.cluster, gpu_spec("H100"), "nvlink") == 450e9
    fabric = Fabric(s, layout_of(s))
    assert fabric.source.bytes_per_s == 2 * 20e9  # two trainer GPUs
    assert [n.bytes_per_s for n in fabric.engine_nics] == [20e9, 20e9]


# --- published updates ------------------------------------------------------------------------------------------------

PUBLISHED = Path(__file__).resolve().parents[2] / "scenarios" / "published"


def totals(study: str) -> dict[str, dict[str, float]]:
    """Variant -> path -> seconds of one update, for broadcast and P2P."""
    found = {}
    for v in load_study(PUBLISHED / f"{study}.yaml").variants:
        w = paths(v.scenario, model_spec(v.scenario.model))
        found[v.name] = {path: w.expected(path).total_s for path in ("broadcast", "p2p")}
    return found


MILES = {
    "GLM-4.7-9B-Flash, 1 + 1 nodes": (2.5086, 4.229),
    "Qwen3-30B-A3B, 2 + 2 nodes": (2.670, 2.1602),
    "GLM-4.5-Air, 4 + 4 nodes": (5.0011, 2.6372),
    "Qwen3-235B-A22B, 8 + 8 nodes": (10.7536, 3.162),
    "GLM-5 744B, 16 + 16 nodes": (58.3015, 8.4797),
    "Kimi-K2 1T, 32 + 32 nodes": (53.2791, 7.2273 - 0.884),
}
"""Miles' P2P document, H100, 1 GB buckets: seconds by NCCL broadcast and by RDMA P2P, without requantisation."""


def test_ws_03_broadcast_and_p2p_of_miles() -> None:
    """Three fitted parameters for twelve numbers: broadcast within a factor of 1.4, P2P of 1.9, everywhere the same
    winner."""
    ours = totals("miles_weight_transfer")
    assert ours.keys() == MILES.keys()
    for name, (broadcast, p2p) in MILES.items():
        got = ours[name]
        assert broadcast / 1.4 < got["broadcast"] < broadcast * 1.4, name
        assert p2p / 1.9 < got["p2p"] < p2p * 1.9, name
        assert (got["p2p"] < got["broadcast"]) == (p2p < broadcast), name


def test_p2p_loses_on_one_node_pair_and_wins_sevenfold_at_1t() -> None:
    ours = totals("miles_weight_transfer")
    ratio = {name: got["broadcast"] / got["p2p"] for name, got in ours.items()}
    assert ratio["GLM-4.7-9B-Flash, 1 + 1 nodes"] < 0.7
    assert ratio["GLM-5 744B, 16 + 16 nodes"] == pytest.approx(6.9, rel=0.3)
    assert ratio["Kimi-K2 1T, 32 + 32 nodes"] > 7


@pytest.mark.parametrize(
    ("variant", "published"),
    [
        ("GLM-4.5-Air, 8 H800", 3.47),
        ("Qwen3-235B-A22B, 8 H800", 6.22),
        ("DeepSeek-V3.1, 16 H20", 10.19),
        ("Kimi-K2, 16 H20", 14.36),
        ("DeepSeek-V3.1, 256 H20", 11.33),
        ("Kimi-K2, 256 H20", 16.04),
    ],
)
def test_broadcast_of_checkpoint_engine(variant: str, published: float) -> None:
    """Every rank sends what it holds: two fitted parameters for six numbers, each within 25 %."""
    assert totals("checkpoint_engine")[variant]["broadcast"] == pytest.approx(published, rel=0.25)


def test_stages_convert_at_once_and_take_turns_on_the_wire() -> None:
    """One stage: send + convert. Four: what one converts is hidden behind the others' turns, the wire decides."""
    model = model_preset("Qwen3-32B")
    costs = COEFFICIENTS
    size, wire = model.params * 2.0, 45e9
    buckets = ceil(size / GIB)
    send, overhead = size / wire + buckets * 1e-5, buckets * 8 * costs.broadcast_receiver_s
    one = paths(split(1, 1, 8), model).expected("broadcast")
    four = paths(split(1, 1, 8, training={"pipeline_parallel": 4, "sharding": "zero1"}), model).expected("broadcast")
    assert one.transfer_s == pytest.approx(send + size / costs.broadcast_convert_bytes_per_s + overhead)
    assert four.transfer_s == pytest.approx(send + overhead)


def test_disk_delta_of_glm_47_flash() -> None:
    """Published: 62.4 GB became 0.69 to 0.83 GB; prepare 15.8 s, pause 0.75 s."""
    w = paths(split(1, 1, 4), of_size(31.2e9))
    cost = w.expected("disk_delta")
    assert 0.69e9 <= w.delta_bytes <= 0.83e9
    assert cost.prepare_s == pytest.approx(15.8, rel=0.05)
    assert cost.apply_s == pytest.approx(0.75, rel=0.05)


@pytest.mark.parametrize(("model", "published"), [(of_size(27e9), 2.5), (model_preset("Qwen3-30B-A3B"), 7.0)])
def test_colocated_cuda_ipc(model: ModelSpec, published: float) -> None:
    """Miles, 27B: 2.5 s. slime, Qwen3-30B-A3B: 7 s, mostly its 18,867 tensors."""
    s = scenario(
        cluster={"gpu": "H100", "nodes": 1, "gpus_per_node": 8},
        placement={"mode": "colocated", "num_gpus": 8, "rollout_num_gpus_per_engine": 2},
        training={"tensor_parallel": 4, "sharding": "zero1"},
    )
    assert paths(s, model).expected("cuda_ipc").total_s == pytest.approx(published, rel=0.15)


# --- properties -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_ws_01_only_weights_travel(path: str) -> None:
    """Payload = parameters x 2 B; the optimizer's 12 B per parameter change nothing."""
    model = model_preset("Qwen3-8B")
    small, large = (
        paths(split(1, 1, 2, training={"optimizer_bytes_per_param": o}), model).prepare(0.0, path, (0,))
        for o in (1, 12)
    )
    assert small == large
    assert small.bytes == (int(model.params * 0.02 * 1.2) if path == "disk_delta" else model.params * 2)


def test_ws_01_payload_has_the_served_format_unless_the_engine_requantises() -> None:
    model = model_preset("Qwen3-8B")
    converted = split(1, 1, 2, rollout__engine={"weight_precision": "fp8"})
    assert paths(converted, model).payload_bytes == model.weight_bytes("fp8")
    requantised = split(1, 1, 2, rollout__engine={"weight_precision": "fp8"}, weights__requantize="fp8")
    assert paths(requantised, model).payload_bytes == model.params * 2


@pytest.mark.parametrize("path", ["broadcast", "p2p", "disk", "disk_delta"])
def test_ws_02_a_different_split_costs_a_conversion(path: str) -> None:
    same = split(1, 1, 8, training={"tensor_parallel": 8, "sharding": "zero1"})
    other = split(1, 1, 8, training={"tensor_parallel": 4, "pipeline_parallel": 2, "sharding": "zero1"})
    model = model_preset("Qwen3-32B")
    assert not paths(same, model).converts and paths(other, model).converts
    costs = [paths(s, model).expected(path) for s in (same, other)]
    assert costs[0].prepare_s < costs[1].prepare_s
    assert costs[0].transfer_s == costs[1].transfer_s


def test_ws_02_a_different_format_costs_a_conversion() -> None:
    training = {"tensor_parallel": 8, "sharding": "zero1"}
    s = split(1, 1, 8, training=training, rollout__engine={"weight_precision": "fp8"})
    assert paths(s, model_preset("Qwen3-32B")).converts


def test_ws_04_the_fastest_transfer_loses_on_the_total() -> None:
    """A delta moves a hundredth of the bytes, and its preparation costs more than broadcasting everything."""
    w = paths(split(1, 1, 8), of_size(31.2e9))
    costs = {p: w.expected(p) for p in PATHS}
    fastest = min(PATHS, key=lambda p: costs[p].transfer_s)
    assert fastest == "disk_delta"
    assert min(PATHS, key=lambda p: costs[p].total_s) == "broadcast"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("requantize", ["none", "fp8"])
def test_ws_03_the_steps_add_up_to_the_expected_cost(path: str, requantize: str) -> None:
    """prepare, copy of every engine at once, requantise on idle links end when the expectation says."""
    s = split(2, 2, 4, weights__requantize=requantize)
    w = paths(s, model_preset("Qwen3-8B"))
    everyone = (0, 1, 2, 3)
    ready = w.prepare(10.0, path, everyone).ready_t
    copied = [w.copy(ready, path, everyone, e) for e in everyone]
    end = max(w.requantize(t, e) for e, t in enumerate(copied))
    assert end - 10.0 == pytest.approx(w.expected(path).total_s, rel=1e-9)


def test_ws_07_without_requantisation_a_copied_engine_is_ready() -> None:
    assert paths(split(1, 1, 8), model_preset("Qwen3-8B")).requantize(5.0, 0) == 5.0


def test_kimi_k2_requantises_in_884_ms() -> None:
    s = split(1, 4, 32, weights__requantize="fp8", rollout__engine={"weight_precision": "fp8"})
    assert paths(s, model_preset("Kimi-K2")).requantize(0.0, 0) == pytest.approx(0.884, rel=0.01)


def test_a_broadcast_serves_its_wave_at_once_and_the_next_wave_again() -> None:
    w = paths(split(1, 1, 2), model_preset("Qwen3-8B"))
    first = [w.copy(1.0, "broadcast", (0, 1), e) for e in (0, 1)]
    assert first[0] == first[1]
    second = [w.copy(first[0], "broadcast", (2, 3), e) for e in (2, 3)]
    assert second[0] == second[1] == pytest.approx(2 * first[0] - 1.0)
    again = w.copy(second[0], "broadcast", (2, 3), 3)  # one engine failed and copies again
    assert again - second[0] == pytest.approx(first[0] - 1.0)


def test_a_receiver_more_costs_a_broadcast_its_overhead_and_no_bandwidth() -> None:
    model = model_preset("Qwen3-32B")
    few, many = (paths(split(1, n, 8), model).expected("broadcast").transfer_s for n in (1, 8))
    buckets = ceil(model.params * 2 / GIB)
    assert many - few == pytest.approx(buckets * 7 * 8 * COEFFICIENTS.broadcast_receiver_s)


def test_p2p_receivers_share_the_sources() -> None:
    """Source adapters of 8 GPUs feed 4 engines of 2 GPUs: the fourth ends when four copies have left."""
    w = paths(split(1, 1, 2), model_preset("Qwen3-8B"))
    ends = [w.copy(0.0, "p2p", (0, 1, 2, 3), e) for e in range(4)]
    one = w.payload_bytes / (8 * 45e9)
    own = w.payload_bytes / (2 * 45e9)
    apply = 2 * w.payload_bytes / 2 / (0.8 * 3.35e12)
    for i, end in enumerate(ends):
        assert end == pytest.approx(i * one + own + 1e-5 + apply, rel=1e-9)


def test_disk_readers_queue_on_the_storage() -> None:
    w = paths(split(1, 1, 2), model_preset("Qwen3-8B"))
    ends = [w.copy(0.0, "disk", (0, 1, 2, 3), e) for e in range(4)]
    gaps = [b - a for a, b in pairwise(ends)]
    assert gaps == pytest.approx([w.payload_bytes / 8e9 + 0.005] * 3)


def test_when_the_trainer_is_released() -> None:
    w = paths(split(1, 1, 2), model_preset("Qwen3-8B"))
    delta = w.prepare(0.0, "disk_delta", (0, 1, 2, 3))
    assert delta.trainer_released_t is not None and delta.trainer_released_t < delta.ready_t / 10
    disk = w.prepare(100.0, "disk", (0, 1, 2, 3))
    assert disk.trainer_released_t == disk.ready_t
    assert w.prepare(200.0, "broadcast", (0, 1, 2, 3)).trainer_released_t is None
    assert w.prepare(200.0, "p2p", (0, 1, 2, 3)).trainer_released_t is None


def test_ws_10_a_delta_is_pulled_before_the_pause() -> None:
    """Only the reload is in the copy: nothing of it depends on the storage."""
    slow = split(1, 1, 2, cluster__storage={"read_gb_per_s": 0.1})
    slow_paths, fast_paths = paths(slow, model_preset("Qwen3-8B")), paths(split(1, 1, 2), model_preset("Qwen3-8B"))
    ready = slow_paths.prepare(0.0, "disk_delta", (0, 1)).ready_t
    assert ready > fast_paths.prepare(0.0, "disk_delta", (0, 1)).ready_t
    assert slow_paths.copy(ready, "disk_delta", (0, 1), 0) - ready == pytest.approx(
        fast_paths.copy(0.0, "disk_delta", (0, 1), 0)
    )


def test_waves_follow_one_another() -> None:
    model = model_preset("Qwen3-8B")
    one = paths(split(1, 1, 2), model).expected("broadcast")
    two = paths(split(1, 1, 2, weights__participation={"type": "waves", "size": 2}), model).expected("broadcast")
    once = ceil(model.params * 2 / GIB) * 8 * COEFFICIENTS.broadcast_receiver_s  # each receiver is in one wave
    assert two.transfer_s == pytest.approx(2 * one.transfer_s - once)
    assert two.prepare_s == one.prepare_s


def test_pl_03_cuda_ipc_needs_a_shared_gpu() -> None:
    w = paths(split(1, 1, 2), model_preset("Qwen3-8B"))
    assert not w.available("cuda_ipc")
    with pytest.raises(ValueError, match="trainer's GPUs"):
        w.expected("cuda_ipc")
    with pytest.raises(ValueError, match="trainer's GPUs"):
        w.copy(0.0, "cuda_ipc", (0,), 0)


def test_restore_brings_the_old_version_back_over_pcie() -> None:
    w = paths(split(1, 1, 2), model_preset("Qwen3-8B"))
    assert w.restore(1.0, 0) == pytest.approx(1.0 + 2 * 8_190_735_360 / 2 / 50e9)


# --- phase switches ---------------------------------------------------------------------------------------------------


def shared(**switch: Any) -> Scenario:
    return scenario(
        cluster={"gpu": "H100", "nodes": 1, "gpus_per_node": 8},
        placement={"mode": "colocated", "num_gpus": 8, "rollout_num_gpus_per_engine": 1, "switch": switch},
    )


def test_pl_02_a_switch_moves_trainer_state_and_weights_over_pcie() -> None:
    """8e9 parameters on 8 GPUs: 16 GB of state a GPU, 0.32 s at 50 GB/s; 16 GB of engine weights, 0.32 s."""
    w = paths(shared(fixed_s=1.5), of_size(8e9))
    assert w.offload_seconds() == pytest.approx(0.32, rel=1e-6)
    assert w.switch_seconds("train") == pytest.approx(1.5 + 0.32, rel=1e-6)
    assert w.switch_seconds("generate") == pytest.approx(1.5 + 0.32 + 0.32, rel=1e-6)


def test_pl_12_without_offload_a_switch_costs_its_fixed_part() -> None:
    w = paths(shared(offload=False, fixed_s=1.5), of_size(8e9))
    assert w.switch_seconds("train") == w.switch_seconds("generate") == 1.5


def test_pl_03_a_separate_placement_never_switches() -> None:
    with pytest.raises(ValueError, match="no pool that switches"):
        paths(split(1, 1, 2), model_preset("Qwen3-8B")).switch_seconds("train")
