"""Engines between two runs: back to version 0, in the format that the next scenario serves."""

from __future__ import annotations

from typing import Any

from testbed.scenario import Scenario
from tests.support.scenarios import scenario

FP8 = {"rollout__engine": {"weight_precision": "fp8"}, "weights__requantize": "fp8"}


def test_qm_07_version_0_is_served_in_the_format_of_each_run(rig: Any) -> None:
    """Expected: the start checkpoint laid out for the engine, its projections in 128 x 128 blocks or as they are."""
    import torch

    from real.learning.quantisation.fp8 import fp8_blocks
    from real.weights.checkpoint import load_checkpoint
    from real.weights.commands import command
    from real.weights.partition import engine_tensors, layout, read_config
    from real.weights.raw import checksum
    from tests.support.real_rig import for_real

    folder = rig.deployment.model.path
    tensors = load_checkpoint(folder, torch.float32)
    plan = layout(read_config(folder), {n: t.shape for n, t in tensors.items()}, 1, 0)
    arrived = engine_tensors(plan, tensors)
    plain = {n: checksum(t) for n, t in arrived.items()}
    blocks = plain | {n: checksum(fp8_blocks(t)) for n, t in arrived.items() if n.endswith("_proj.weight")}
    assert blocks != plain

    async def held(config: Scenario) -> list[dict[str, str]]:
        await rig.deployment.reset(config)
        answers = [await command(engine, "checksum", 60) for engine in rig.deployment.engines]
        return [answer["checksums"] for [answer] in answers]

    assert rig.wait(held(for_real(scenario(**FP8)))) == [blocks, blocks]
    assert rig.wait(held(for_real(scenario()))) == [plain, plain]
