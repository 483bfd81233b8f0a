"""How good a model is on held-out tasks: one engine generates, the environment's tools answer, its verifier scores.

Nothing is trained and no core decides: tasks run side by side, one response each. Where teachers are named, the tokens
that the model chose are scored by the model and by the task's teacher, both in the trainer's arithmetic. It refuses to
know graphs of stages and files of results."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from real.deployment import environment_of, model_of
from real.engines.client import EngineClient
from real.engines.options import ServerOptions
from real.engines.server import EngineServer
from real.environments.base import Environment, RealTask
from real.errors import EngineGone, EngineRefused, RealError
from real.models.prepare import PreparedModel
from real.records import Record
from real.settings import Place, device_of, server_options, signal_options, teaching_of, trainer_options
from real.store import Conversation
from real.trainer.local import LocalRank
from real.trainer.rank import TrainerRank
from real.trainer.trainer import Trainer
from testbed.metrics.scores import Score, mean_of
from testbed.scenario import Scenario

HELD_OUT = 5_000_011
"""Added to the run's seed for the tasks: another stream of the same generator. Where a generator has few different
tasks, some of them are those of training."""

Stage = Callable[[str], None]
PATHS = ("_name_or_path", "dtype", "torch_dtype", "transformers_version")
"""Keys of a config.json that say nothing about the shapes of its weights."""


def held_out(scenario: Scenario) -> Scenario:
    """The same scenario with another stream of tasks."""
    seed = scenario.run.seed + HELD_OUT
    return scenario.model_copy(update={"run": scenario.run.model_copy(update={"seed": seed})})


class Evaluator:
    """Keeps its engine from one evaluation to the next: a model of the same shapes is loaded into it, for another it is
    started anew. Close it in the end. Make it in a thread that lives as long."""

    def __init__(self) -> None:
        self._server: EngineServer | None = None
        self._options: ServerOptions | None = None
        self._loads = 0

    def close(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    def evaluate(
        self, scenario: Scenario, base_dir: Path, tasks: int, log: Path, stage: Stage = lambda _: None
    ) -> list[Score]:
        """Mean reward of the scenario's model over `tasks` held-out tasks, over all of them and then by kind (if there
        are several); with the KL to the teachers that the scenario names. Fewer tasks where the data set ends. Equal
        seeds give every model the same tasks. A server that has to be started logs to `log`. Engines serve plain
        weights here, also where the scenario's runs serve quantised ones.

        Raises `RealError` where something cannot be brought up, or there are no tasks."""
        model = model_of(scenario, base_dir)
        device = device_of(scenario)
        held = held_out(scenario)
        gpus = tuple(range(scenario.placement.rollout_num_gpus_per_engine))
        options = server_options(held, model.path, device, Place(0, gpus))
        server, fresh = self._serve(options, log, stage, scenario.real.start_timeout_s)
        stage(f"answering {tasks} tasks")
        try:
            done = asyncio.run(self._answers(server, fresh, held, base_dir, model, tasks))
        except (EngineGone, EngineRefused) as error:
            raise RealError(f"the engine failed while it answered: {error}. Its log: {log}") from None
        if not done:
            raise RealError("evaluate: the environment has no tasks")
        ratios: list[float | None] = [None] * len(done)
        if scenario.real.teachers:
            stage("asking the teachers")
            ratios = asyncio.run(_log_ratios(held, base_dir, model.path, device, done))
        return scores_of(done, ratios)

    def _serve(self, options: ServerOptions, log: Path, stage: Stage, timeout_s: float) -> tuple[EngineServer, bool]:
        """A server with these options, and whether it has just loaded the model."""
        have = self._options
        if self._server is not None and have is not None:
            same = replace(options, model_path=have.model_path) == have and _shapes(options) == _shapes(have)
            if same and self._server.alive:
                return self._server, False
            self.close()
        stage("starting an engine")
        self._server, self._options, self._loads = EngineServer.start(options, log), options, 0
        self._server.wait_ready(timeout_s)
        return self._server, True

    async def _answers(
        self, server: EngineServer, fresh: bool, scenario: Scenario, base_dir: Path, model: PreparedModel, tasks: int
    ) -> list[Conversation]:
        client = EngineClient(server.url, timeout_s=scenario.real.request_timeout_s)
        environment = environment_of(scenario, base_dir, model)
        try:
            if not fresh:
                self._loads += 1
                await client.update_from_disk(model.path, weight_version=f"{self._loads}", flush_cache=True)
            await environment.open()
            return await answer_all(scenario, client, environment, tasks)
        finally:
            await environment.close()
            await client.close()


def _shapes(options: ServerOptions) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((Path(options.model_path) / "config.json").read_text())
    return {k: v for k, v in config.items() if k not in PATHS}


async def answer_all(
    scenario: Scenario, client: EngineClient, environment: Environment, tasks: int
) -> list[Conversation]:
    """So many at a time as the engine runs and the tool server has environments for."""
    environments = scenario.workload.tools.environments or tasks
    slots = asyncio.Semaphore(min(scenario.rollout.engine.max_running_requests, environments))
    drawn = [task for _ in range(tasks) if (task := environment.draw()) is not None]

    async def answer(task: RealTask) -> Conversation:
        async with slots:
            return await _answer(scenario, client, environment, task)

    work = [asyncio.create_task(answer(task)) for task in drawn]
    try:
        return await asyncio.gather(*work)
    finally:
        for one in work:
            one.cancel()
        await asyncio.gather(*work, return_exceptions=True)


async def _answer(scenario: Scenario, client: EngineClient, environment: Environment, task: RealTask) -> Conversation:
    """One whole trajectory; its reward is set."""
    who, turn = (task.index, 0), 0
    c = Conversation(task.index, task.index, task, 0)
    if task.environment:
        await environment.prepare(task, who)
    try:
        while True:
            limits = environment.limits(task, 0, turn, len(c.ids))
            g = await client.generate(
                rid=f"{task.index}-{turn}",
                input_ids=c.ids,
                max_new_tokens=limits.max_new_tokens,
                temperature=scenario.real.temperature,
                stop_token_ids=limits.stop_token_ids,
                ignore_eos=limits.ignore_eos or scenario.rollout.ignore_eos,
            )
            c.answered(g, tuple((int(v), start, end) for v, start, end in g.spans))
            call = environment.after_turn(task, 0, turn, g.output_ids)
            if call is None:
                break
            c.observed(await environment.run_tool(task, who, call))
            turn += 1
        response = c.ids[c.prompt_tokens :]
        c.reward = await environment.reward(task, 0, list(task.prompt_ids), response, c.outputs)
    finally:
        if task.environment:
            await environment.release_member(task, who)
        environment.release(task.index)
    return c


async def _log_ratios(
    scenario: Scenario, base_dir: Path, model_path: Path, device: str, done: Sequence[Conversation]
) -> list[float | None]:
    """Per conversation: the sum over its sampled tokens of log p(model) - log p(its teacher)."""
    options = trainer_options(scenario, base_dir.resolve(), model_path, device)
    rank = LocalRank(TrainerRank(0, 1, options))
    trainer = Trainer([rank], options.loss, signal_options(scenario))
    teaches = teaching_of(scenario)
    try:
        await trainer.connect()
        records: list[Record] = [c.record() for c in done]
        own = await trainer.log_probs(records)
        teachers = [f"teacher:{teaches(c.task)}" for c in done]
        sums: list[float | None] = [None] * len(done)
        for name in sorted(set(teachers)):
            of = [i for i, t in enumerate(teachers) if t == name]
            for i, theirs in zip(of, await trainer.log_probs([records[i] for i in of], name), strict=True):
                sums[i] = float((own[i] - theirs)[records[i].loss_mask].sum(dtype="float64"))
        await trainer.shutdown()
    finally:
        rank.close()
    return sums


def scores_of(done: Sequence[Conversation], log_ratios: Sequence[float | None]) -> list[Score]:
    kinds = sorted({c.task.kind for c in done})
    scores = []
    for kind in ["", *(kinds if len(kinds) > 1 else [])]:
        of = [(c, r) for c, r in zip(done, log_ratios, strict=True) if kind in ("", c.task.kind)]
        tokens = sum(sum(c.mask) for c, _ in of)
        ratios = [r for _, r in of if r is not None]
        kl = math.fsum(ratios) / max(tokens, 1) if len(ratios) == len(of) else None
        scores.append(Score(kind, mean_of([c.reward for c, _ in of]), kl))
    return scores
