"""The worked examples of the seeds on real engines and a real trainer: v10 to v11, staleness 1 and 2 over a
mid-generation update, a publication that fails, engines that are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from real.driver import RealBackend
from testbed.core import actions as do
from testbed.core import events as said
from testbed.scenario import Scenario
from tests.contract.test_contract import every
from tests.support.invariants import Record, replayed, watched
from tests.support.scenarios import scenario

GROUP_OF_FOUR = {"n_samples_per_prompt": 4, "rollout_batch_size": 1}


def system(**changes: Any) -> Scenario:
    from tests.support.real_rig import for_real

    return for_real(scenario(**changes))


def checked(config: Scenario, records: Sequence[Record]) -> None:
    """The invariants of the contract, and a replay that agrees."""
    watched(config, records)
    replayed(config, records)


def test_rp_01_and_lm_22_a_question_answered_by_v10_leads_to_v11(rig: Any) -> None:
    """Four responses by version 10, one update, both engines serve version 11; tokens stay, probabilities move."""
    config = system(algorithm=GROUP_OF_FOUR, run__num_rollout=11)
    trained: dict[int, Any] = {}
    backend, records = rig.backend(config)
    checked(config, records)
    for _, a in every(records, do.Train):
        trained[a.batch] = a
    tenth = trained[10]
    assert len(tenth.experiences) == 4 and len({x.group for x in tenth.experiences}) == 1
    assert {(x.oldest_version, x.newest_version) for x in tenth.experiences} == {(10, 10)}
    hops = [
        (type(x).__name__, getattr(x, "version", None))
        for t, x in every(records, do.Train, said.TrainStepFinished, do.PrepareWeights, said.EngineResumed)
        if t >= next(t for t, a in every(records, do.Train) if a.batch == 10)
    ]
    assert hops == [
        ("Train", None),
        ("TrainStepFinished", None),
        ("PrepareWeights", 11),
        ("EngineResumed", 11),
        ("EngineResumed", 11),
    ]
    assert [slot.version for slot in backend.fleet.slots] == [11, 11]
    assert backend.fleet.drift == 0


def test_as_06_and_er_08_staleness_1_at_completion_and_2_at_dequeue_over_a_real_update(rig: Any) -> None:
    """Starts with v, goes on with v + 1 after a synchronisation in the middle of a turn, waits in the buffer while
    v + 2 is published: the deployed version minus the oldest one is 1 at completion and 2 at dequeue."""
    config = system(
        workload__reply={"type": "uniform", "low": 400, "high": 800},  # about as long as a step
        rollout__admission={"type": "bounded", "max_head_offpolicyness": 2},
        weights__transition={"pause_generation_mode": "in_place", "kv": "salt_by_version"},
        run__num_rollout=14,
    )
    _, records = rig.backend(config)
    checked(config, records)
    spans: dict[int, list[tuple[int, int, int]]] = {}
    completed: dict[int, int] = {}
    seen: set[tuple[int, int, int]] = set()
    serving = [0, 0]
    for event, actions in records:
        if isinstance(event, said.EngineResumed):
            serving[event.engine] = event.version
        elif isinstance(event, said.TurnFinished):
            spans[event.trajectory] = list(event.spans)
            completed[event.trajectory] = min(serving)
        for a in actions:
            if isinstance(a, do.Train):
                for x in a.experiences:
                    versions = [v for v, _, _ in spans[x.trajectory]]
                    assert (x.oldest_version, x.newest_version) == (min(versions), max(versions))
                    seen.add((len(versions), x.completion_deployed - versions[0], x.dequeue_deployed - versions[0]))
    assert (2, 1, 2) in seen, f"(versions in a turn, staleness at completion, at dequeue): {sorted(seen)}"


class TornOnce:
    """The disk path, with version 2's file cut in half once it is published: a storage fault."""

    def __init__(self, path: Any, folder: Any) -> None:
        self._path = path
        self._folder = folder
        self.torn = 0
        self.releases_trainer_after_prepare = path.releases_trainer_after_prepare

    def __getattr__(self, name: str) -> Any:
        return getattr(self._path, name)

    async def prepare(self, version: int, engines: Any) -> Any:
        prepared = await self._path.prepare(version, engines)
        if version == 2 and not self.torn:
            for file in self._folder.rglob("*.safetensors"):
                if "2" in file.parent.name:
                    self.torn += 1
                    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        return prepared


def test_ws_14_a_torn_publication_fails_and_the_old_version_goes_on_serving(rig: Any) -> None:
    config = system(
        weights__path={"type": "fixed", "update_weight_transfer_mode": "disk"},
        rollout__admission={"type": "bounded", "max_head_offpolicyness": 2},
        run__num_rollout=5,
    )
    records: list[Record] = []

    async def go() -> TornOnce:
        d = rig.deployment
        await d.reset(config)
        folder = d.folder / "weights"
        torn = d.paths["disk"] = TornOnce(d.paths["disk"], folder)
        await RealBackend(config, d, [lambda e, a: records.append((e, list(a)))]).run()
        return torn

    assert rig.wait(go()).torn == 1
    checked(config, records)
    failures = [e for _, e in every(records, said.WeightUpdateFailed)]
    assert failures and {e.version for e in failures} == {2} and {e.stage for e in failures} <= {"copy", "prepare"}
    failed_t = next(t for t, _ in every(records, said.WeightUpdateFailed))
    again = next(t for t, e in every(records, said.EngineResumed) if e.version == 2)
    assert again > failed_t
    served = {v for t, e in every(records, said.TurnFinished) if failed_t < t < again for v, _, _ in e.spans}
    assert served <= {0, 1}, "the old version serves until the next publication succeeds"
    assert max(e.version for _, e in every(records, said.EngineResumed)) >= 3


@pytest.fixture
def mended(rig: Any) -> Iterator[Any]:
    """The rig, with every engine up again afterwards."""
    yield rig

    async def mend() -> None:
        for engine in rig.deployment.engines:
            if not await engine.client.health():
                await rig.deployment.relaunch(engine.index)

    rig.wait(mend())


def test_ws_06_and_ap_13_publications_wait_for_participants_only_when_an_engine_dies_and_comes_back(
    mended: Any,
) -> None:
    """Killed, then brought up again: publications go on with the other engine alone; the one that is back copies the
    deployed version before it takes a turn."""
    config = system(rollout__admission={"type": "bounded", "max_head_offpolicyness": 2}, run__num_rollout=100_000)
    records: list[Record] = []
    faults = (said.EngineLost(1.0, 1), said.EngineJoined(2.0, 1, 0))

    async def go() -> None:
        await mended.deployment.reset(config)
        back = asyncio.Event()

        def observe(event: said.Event, actions: list[do.Action]) -> None:
            records.append((event, list(actions)))
            joined = any(isinstance(e, said.EngineJoined) for e, _ in records[-400:]) or back.is_set()
            if joined and isinstance(event, said.TurnFinished) and event.engine == 1:
                back.set()

        run = asyncio.create_task(RealBackend(config, mended.deployment, [observe], faults).run())
        waiting = asyncio.create_task(back.wait())
        await asyncio.wait({run, waiting}, timeout=240, return_when=asyncio.FIRST_COMPLETED)
        run.cancel()
        waiting.cancel()
        await asyncio.gather(run, waiting, return_exceptions=True)

    mended.wait(go())
    replayed(config, records)
    lost = next(i for i, (e, _) in enumerate(records) if isinstance(e, said.EngineLost))
    joined = next(i for i, (e, _) in enumerate(records) if isinstance(e, said.EngineJoined))
    between = [a for _, actions in records[lost + 1 : joined] for a in actions]
    publications = [a for a in between if isinstance(a, do.PrepareWeights)]
    assert publications and all(a.participants == (0,) for a in publications)
    assert not [a for a in between if getattr(a, "engine", 0) == 1]
    after = [x for e, actions in records[joined + 1 :] for x in (e, *actions)]
    mine = [x for x in after if isinstance(x, do.StartTurn | said.EngineResumed) and x.engine == 1]
    assert isinstance(mine[0], said.EngineResumed) and mine[0].version > 0
    first = next(x for x in after if isinstance(x, said.TurnFinished) and x.engine == 1)
    assert first.spans[0][0] > 0


def test_ws_04_the_path_is_chosen_by_measured_total_cost(rig: Any) -> None:
    """Candidates are carried out once on the engines, then the cheapest in total is used."""
    config = system(
        weights__path={"type": "cheapest", "among": ["broadcast", "p2p", "disk"]},
        run__num_rollout=2,
    )
    _, records = rig.backend(config)
    checked(config, records)
    started = records[0][0]
    assert isinstance(started, said.RunStarted)
    costs = {c.path: c.total_s for c in started.path_costs}
    assert set(costs) == {"broadcast", "p2p", "disk"} and min(costs.values()) > 0
    chosen = {a.path for _, a in every(records, do.PrepareWeights)}
    assert chosen == {min(costs, key=lambda p: costs[p])}
