"""Held-out tasks of a run (`real.eval_tasks`), answered by one of its engines before the first batch and after the
last.

Engines serve plain weights for it, also where the run's are quantised. Outside the run's time. It refuses to know how a
task is answered."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from real.deployment import Deployment, environment_of
from real.evaluate import answer_all, held_out, scores_of
from real.weights.handle import EngineHandle
from testbed.metrics.scores import Score
from testbed.scenario import Scenario


async def score_start(deployment: Deployment, scenario: Scenario) -> list[Score]:
    """What the start model gets; nothing if it is not asked for. The engine is as it was afterwards."""
    if scenario.real.eval_tasks is None:
        return []
    engine = deployment.engines[0]
    if scenario.weights.requantize == "none":
        return [await _score(deployment, scenario, engine)]
    await engine.client.update_from_disk(deployment.model.path, weight_version="0", flush_cache=True)
    score = await _score(deployment, scenario, engine)
    await deployment.serve_start([engine])
    return [score]


async def score_trained(deployment: Deployment, scenario: Scenario, lost: Sequence[bool]) -> list[Score]:
    """What the trainer's weights get, on the first engine that is not `lost`, which keeps them; nothing if it is not
    asked for or no engine is left."""
    left = [engine for engine, gone in zip(deployment.engines, lost, strict=True) if not gone]
    if scenario.real.eval_tasks is None or not left:
        return []
    folder = deployment.folder / "trained"
    shutil.rmtree(folder, ignore_errors=True)
    await deployment.trainer.onload()
    await deployment.trainer.save(folder, {})
    await left[0].client.update_from_disk(folder, weight_version=f"{scenario.run.num_rollout}", flush_cache=True)
    shutil.rmtree(folder)
    return [await _score(deployment, scenario, left[0])]


async def _score(deployment: Deployment, scenario: Scenario, engine: EngineHandle) -> Score:
    environment = environment_of(held_out(scenario), deployment.base_dir, deployment.model)
    await environment.open()
    try:
        done = await answer_all(scenario, engine.client, environment, scenario.real.eval_tasks or 0)
    finally:
        await environment.close()
    return scores_of(done, [None] * len(done))[0]
