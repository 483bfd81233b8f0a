"""What a real run runs on, up and ready: prepared model, engines, trainer, environment, weight paths.

Responsible for bringing it up, for putting it back to version 0 between runs, and for taking it down without leaving a
process behind. It refuses to know events and actions."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from real.cluster import Cluster, EngineHost
from real.engines.client import EngineClient
from real.environments import Environment, environment
from real.errors import EngineGone, EngineRefused, RealError, UpdateFailed
from real.fleet import EngineSlot
from real.garbage import settle
from real.models.prepare import PreparedModel, prepare_model
from real.models.warmup import Warmup
from real.settings import Place, device_of, places_of, server_options, signal_options, teaching_of, trainer_options
from real.trainer.options import TrainerOptions
from real.trainer.rank import TrainerRank
from real.trainer.trainer import Trainer
from real.weights.agree import Agreement
from real.weights.handle import EngineHandle
from real.weights.paths import WeightPath, weight_path
from testbed.core import events as said
from testbed.scenario import Scenario
from testbed.scenario.layout import layout_of
from testbed.scenario.model import ConfigJsonModel, PresetModel
from testbed.scenario.real import Warmup as WarmupSection
from testbed.workloads import workload

Stage = Callable[[str], None]
"""Hears what is being brought up, in words."""

MODEL_SEED = 0
"""Presets are made and warmed up with this seed whatever the run's: all runs start from one model."""


class Deployment:
    """Made by `deployed`; the driver reads its attributes."""

    def __init__(
        self,
        scenario: Scenario,
        base_dir: Path,
        folder: Path,
        model: PreparedModel,
        hosts: list[EngineHost],
        engines: list[EngineHandle],
        trainer: Trainer,
        environment: Environment,
        device: str,
        cluster: Cluster,
        launch: Callable[[int], EngineHost],
    ) -> None:
        self.scenario = scenario
        self.base_dir = base_dir
        self.folder = folder
        """Shared with engines and ranks: weights on their way, logs, the start checkpoint."""
        self.model = model
        self.hosts = hosts
        self.engines = engines
        self.trainer = trainer
        self.environment = environment
        self.device = device
        self._cluster = cluster
        self._launch = launch
        self.teacher_of = teaching_of(scenario)
        """Task -> name of its teacher."""
        self.skipped = 0
        """Tasks that the run of the loaded checkpoint had taken."""
        self.paths: dict[str, WeightPath] = {}
        self.agreement: Agreement
        self._fresh_paths()

    def _fresh_paths(self) -> None:
        weights = self.scenario.weights
        choice = weights.path
        names: Iterable[str] = choice.among if choice.type == "cheapest" else (choice.update_weight_transfer_mode,)
        if self.scenario.placement.mode != "disaggregated":
            names = (*names, "cuda_ipc")
        weights_folder = self.folder / "weights"
        shutil.rmtree(weights_folder, ignore_errors=True)
        weights_folder.mkdir(parents=True)
        self.paths = {
            name: weight_path(
                name,
                self.trainer,
                folder=weights_folder,
                timeout_s=weights.timeout_s,
                bucket_bytes=weights.update_weight_buffer_size,
                device=self.device,
            )
            for name in dict.fromkeys(names)
        }
        self.agreement = Agreement(self.trainer, folder=weights_folder, timeout_s=weights.timeout_s)

    # --- between runs -------------------------------------------------------------------------------------------------

    async def reset(self, scenario: Scenario) -> None:
        """Back to version 0 for another run of a scenario that asks for the same deployment."""
        self.scenario = scenario = await asyncio.to_thread(with_teachers, scenario, self.base_dir)
        self.teacher_of = teaching_of(scenario)
        self.trainer = self.trainer.with_signals(signal_options(scenario))
        await self.environment.close()
        self.environment = environment_of(scenario, self.base_dir, self.model)
        await self.environment.open()
        position = await self.trainer.restore(self.folder / "start")
        self.skip(position.get("tasks", 0))
        for slot in (EngineSlot(h) for h in self.engines):
            await slot.handle.client.update_from_disk(self.model.path, weight_version="0", flush_cache=True)
        await self.close_paths()
        self._fresh_paths()
        await self.serve_start(self.engines)

    async def serve_start(self, engines: Iterable[EngineHandle]) -> None:
        """Engines that have loaded the start checkpoint get it into the format that later versions are served in."""
        rule = self.scenario.weights.requantize
        if rule != "none":
            try:
                await asyncio.gather(*(self.agreement.check(engine, 0, rule) for engine in engines))
            except UpdateFailed as failed:
                raise RealError(f"the start checkpoint could not be served in {rule}: {failed}") from failed

    def skip(self, tasks: int) -> None:
        """Leave out tasks that the loaded checkpoint has seen."""
        self.skipped = tasks
        for _ in range(tasks):
            task = self.environment.draw()
            if task is not None:
                self.environment.release(task.index)

    async def close_paths(self) -> None:
        """No group, server or snapshot of a run stays."""
        for path in self.paths.values():
            await path.close()
        for rank in range(self.trainer.world):
            await self.trainer.call(rank, "publish", "close")

    async def quiet(self, slots: Sequence[EngineSlot]) -> None:
        """After a run: nothing generates, nothing is paused, no memory is lent."""
        for slot in slots:
            if slot.lost:
                continue
            try:
                client = slot.handle.client
                if slot.paused:
                    await client.resume()
                if slot.released:
                    await client.resume_memory()
                await client.pause("abort")
                await client.resume()
            except (EngineGone, EngineRefused):
                continue

    # --- path costs ---------------------------------------------------------------------------------------------------

    async def path_costs(self, scenario: Scenario) -> tuple[said.PathCost, ...]:
        """What one publication costs by each path to choose from: each is carried out once, with the weights that the
        engines have. Nothing is measured for a fixed path."""
        if scenario.weights.path.type != "cheapest":
            return ()
        costs = []
        for name, path in self.paths.items():
            prepared = await path.prepare(0, self.engines)
            started = time.monotonic()
            await path.copy(0, self.engines, lambda _: None)
            copied = time.monotonic()
            digests = [await self.agreement.check(e, 0, scenario.weights.requantize) for e in self.engines]
            costs.append(
                said.PathCost(
                    name,
                    prepared.seconds,
                    copied - started,
                    max(d.check_s for d in digests),
                    max(d.requantize_s for d in digests),
                )
            )
        return tuple(costs)

    # --- losses -------------------------------------------------------------------------------------------------------

    async def kill(self, engine: int) -> None:
        """End a server the hard way: nothing of it answers any more."""
        host = self.hosts[engine]
        await host.run(os.kill, await host.pid(), signal.SIGKILL)

    async def relaunch(self, engine: int) -> EngineHandle:
        """A fresh server in the place of one that is gone; it serves version 0."""
        self._cluster.drop(self.hosts[engine])
        host = self.hosts[engine] = self._launch(engine)
        url = await host.ready(self.scenario.real.start_timeout_s)
        await self.engines[engine].client.close()
        old = self.engines[engine]
        client = EngineClient(url, timeout_s=self.scenario.real.request_timeout_s)
        self.engines[engine] = EngineHandle(old.index, client, old.tp_size, host, old.node, old.routed_experts)
        await self.serve_start([self.engines[engine]])
        return self.engines[engine]


PER_RUN = {"advantage", "n_samples_per_prompt", "rollout_batch_size", "num_steps_per_rollout"}
"""Of the algorithm: what the core and `Deployment.reset` take from the run at hand."""


def deployment_key(scenario: Scenario) -> str:
    """Equal for scenarios that can run one after another on one deployment: made of what engines, ranks and models are
    started with. The rest is the core's, or what `Deployment.reset` changes."""
    own = scenario.model_dump(mode="json", include={"model", "cluster", "placement", "real"})
    own["training"] = scenario.training.model_dump(mode="json", exclude={"cost"})
    own["engine"] = scenario.rollout.engine.model_dump(mode="json")
    a = scenario.algorithm
    own["algorithm"] = a.model_dump(mode="json", exclude=PER_RUN), a.needs_critic, a.needs_teacher
    own["requantize"] = scenario.weights.requantize
    if scenario.real.warmup.steps or scenario.real.teachers:  # a warm-up shows answers of the workload's tasks
        own["workload"] = scenario.workload.model_dump(mode="json")
    return str(own)


def environment_of(scenario: Scenario, base_dir: Path, model: PreparedModel) -> Environment:
    w: Any = scenario.workload
    config = getattr(w, "environment", None)
    return environment(
        config,
        tokenizer=model.tokenizer,
        members=scenario.members_started,
        seed=scenario.run.seed,
        num_tasks=getattr(w, "num_tasks", None),
        max_response_length=w.max_response_length,
        workload=workload(scenario, base_dir) if config is None else None,
        base_dir=base_dir,
    )


def cache_folder() -> Path:
    """Where prepared models are kept: `RL_TESTBED_CACHE`, or the user's cache folder."""
    named = os.environ.get("RL_TESTBED_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "rl-testbed"


def model_of(scenario: Scenario, base_dir: Path) -> PreparedModel:
    """The model folder that engines and trainer start from, made and warmed up if it is not there yet."""
    if scenario.real.load is not None:
        return prepare_model(str(base_dir / scenario.real.load), cache_folder(), MODEL_SEED)
    return _warmed_up(scenario, base_dir, scenario.real.warmup)


def with_teachers(scenario: Scenario, base_dir: Path) -> Scenario:
    """The same with a folder for each teacher that is a warm-up, made if it is not there yet."""

    def folder(teacher: str | WarmupSection) -> str:
        return teacher if isinstance(teacher, str) else str(_warmed_up(scenario, base_dir, teacher).path.absolute())

    given = scenario.real.teachers
    made = {k: folder(t) for k, t in given.items()} if isinstance(given, dict) else tuple(folder(t) for t in given)
    return scenario.model_copy(update={"real": scenario.real.model_copy(update={"teachers": made})})


def _warmed_up(scenario: Scenario, base_dir: Path, options: WarmupSection) -> PreparedModel:
    config = scenario.model
    if isinstance(config, PresetModel):
        name = config.name
    elif isinstance(config, ConfigJsonModel):
        path = base_dir / config.path
        name = str(path.parent if path.name == "config.json" else path)
    else:
        name = config.name
    warmup = Warmup(**options.model_dump()) if options.steps else None
    shown = None
    if warmup is not None:
        bare = prepare_model(name, cache_folder(), MODEL_SEED)
        shown = environment_of(scenario, base_dir, bare)
    return prepare_model(name, cache_folder(), MODEL_SEED, warmup=warmup, environment=shown)


@asynccontextmanager
async def deployed(
    scenario: Scenario, base_dir: Path, folder: Path, stage: Stage = lambda _: None
) -> AsyncIterator[Deployment]:
    """Bring up all that the scenario's runs need, and take it down. `folder`: absolute, shared by all nodes.

    Raises `real.errors.RealError` (and its kinds) with what is wrong, where, and what works instead.
    """
    device = device_of(scenario)
    stage("preparing the model")
    model = await asyncio.to_thread(model_of, scenario, base_dir)
    scenario = await asyncio.to_thread(with_teachers, scenario, base_dir)
    world = environment_of(scenario, base_dir, model)  # what it and the trainer lack is said before anything starts
    learner = trainer_options(scenario, base_dir.resolve(), model.path, device)
    layout = layout_of(scenario)
    folder.mkdir(parents=True, exist_ok=True)
    stage("starting Ray")
    slots = sum(e.gpus for e in layout.engines) + layout.train_gpus
    cluster = Cluster.start(scenario.real.ray_address, slots)
    try:
        have = scenario.cluster.gpus_per_node if device == "cpu" else cluster.gpus(0)
        places = places_of(scenario, have)

        def launch(index: int) -> EngineHost:
            place = places.engines[index]
            options = server_options(scenario, model.path, device, place)
            return cluster.engine(options, node=place.node, log_path=folder / "logs" / f"engine-{index}.log")

        count = len(layout.engines)
        stage(f"starting {count} engine{'s' * (count != 1)} and {len(places.ranks)} trainer rank(s)")
        (folder / "logs").mkdir(exist_ok=True)
        hosts = [launch(i) for i in range(count)]
        trainer = _trainer(cluster, scenario, learner, device, places.ranks)
        urls, _ = await asyncio.gather(
            asyncio.gather(*(h.ready(scenario.real.start_timeout_s) for h in hosts)), trainer.connect()
        )
        engines = []
        for i, url in enumerate(urls):
            options = server_options(scenario, model.path, device, places.engines[i])
            client = EngineClient(url, timeout_s=scenario.real.request_timeout_s)
            engines.append(
                EngineHandle(
                    i, client, options.tp_size, None, places.engines[i].node, options.enable_return_routed_experts
                )
            )
        await world.open()
        start = folder / "start"
        shutil.rmtree(start, ignore_errors=True)
        load = scenario.real.load
        position = await trainer.restore(base_dir.resolve() / load) if load is not None else {}
        await trainer.save(start, position)
        await trainer.settle()
        settle()
        deployment = Deployment(
            scenario, base_dir, folder, model, hosts, engines, trainer, world, device, cluster, launch
        )
        deployment.skip(position.get("tasks", 0))
        try:
            await deployment.serve_start(engines)
            yield deployment
        finally:
            await deployment.environment.close()
            await asyncio.gather(*(e.client.close() for e in deployment.engines), return_exceptions=True)
    finally:
        await asyncio.to_thread(cluster.close)
        shutil.rmtree(folder / "weights", ignore_errors=True)
        shutil.rmtree(folder / "start", ignore_errors=True)


def _trainer(
    cluster: Cluster, scenario: Scenario, options: TrainerOptions, device: str, places: Sequence[Place]
) -> Trainer:
    ranks = cluster.ranks(
        len(places),
        factory=partial(_rank, world=len(places), options=options),
        nodes=[p.node for p in places],
        device=device,
        gpus=[p.gpus[0] for p in places],
    )
    return Trainer(ranks, options.loss, signal_options(scenario))


def _rank(rank: int, world: int, options: Any) -> TrainerRank:
    return TrainerRank(rank, world, options)
