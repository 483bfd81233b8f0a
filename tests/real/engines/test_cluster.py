"""Placement with Ray: a cluster of two "nodes" on this machine, engines and ranks where they were asked for, and a
killed driver that leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from real.cluster import Cluster
from real.engines.client import EngineClient
from real.engines.options import REPOSITORY, ServerOptions
from real.errors import EngineGone, EngineStartError, RealError

Run = Callable[[Coroutine[Any, Any, Any]], Any]


class Rank:
    """What a rank may be: knows its number, where it runs, and how to fail."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.calls = 0

    def where(self) -> tuple[int, str]:
        return self.rank, node_id()

    def count(self, by: int, times: int = 1) -> int:
        self.calls += by * times
        return self.calls

    def pid(self) -> int:
        return os.getpid()

    def refuse(self) -> None:
        raise RealError("not today")

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def node_id() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def broken(rank: int) -> Rank:
    raise RealError(f"rank {rank} has no weights")


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Any]:
    """A running Ray of two nodes with eight slots each, which the code under test did not start."""
    from ray.cluster_utils import Cluster as Machines

    machines = Machines(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "resources": {"slot": 8}, "object_store_memory": 100 * 2**20},
    )
    machines.add_node(num_cpus=1, resources={"slot": 8}, object_store_memory=100 * 2**20)
    yield machines
    machines.shutdown()


@pytest.fixture(scope="module")
def cluster(two_nodes: Any) -> Iterator[Cluster]:
    cluster = Cluster.start(two_nodes.address, slots=0)
    yield cluster
    cluster.close()


def test_engines_and_ranks_run_on_their_nodes_and_rk_07_without_a_prefix_cache_nothing_is_found(
    cluster: Cluster, tiny_model: Path, tmp_path: Path, run: Run
) -> None:
    assert cluster.nodes == 2
    options = ServerOptions(str(tiny_model), max_total_tokens=2048, context_length=1024, disable_radix_cache=True)
    host = cluster.engine(options, node=1, log_path=tmp_path / "engine.log")
    ranks = cluster.ranks(3, factory=Rank, nodes=[0, 1, 0])

    async def scenario() -> None:
        places = await asyncio.gather(*(rank.call("where") for rank in ranks))
        assert places == [(0, cluster.node_id(0)), (1, cluster.node_id(1)), (2, cluster.node_id(0))]
        assert len(set(places)) == 3
        assert await ranks[1].call("count", 2) == 2
        assert await ranks[1].call("count", 2, times=3) == 8  # one object, built once

        await host.ready()
        assert await host.run(node_id) == cluster.node_id(1)
        client = EngineClient(host.url)
        ask = {"input_ids": [5, 6, 7], "max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True}
        twice = [await client.generate(rid=rid, **ask) for rid in "ab"]
        assert [(len(got.output_ids), got.cached_tokens) for got in twice] == [(4, 0), (4, 0)]
        assert twice[0].output_ids == twice[1].output_ids
        await client.close()

        server = psutil.Process(await host.pid())
        family = [server, *server.children(recursive=True)]
        assert len(family) >= 3
        await host.stop()
        assert await host.exit_code() is not None
        assert not any(process.is_running() for process in family)

    run(scenario())


def test_more_than_a_node_has_is_refused(cluster: Cluster, tiny_model: Path, tmp_path: Path) -> None:
    options = ServerOptions(str(tiny_model), tp_size=9)
    with pytest.raises(RealError, match=r"needs slots up to \d+, but node 1 has 8"):
        cluster.engine(options, node=1, log_path=tmp_path / "log")
    with pytest.raises(RealError, match=r"node 2 of a cluster of 2 \(0 .. 1\)"):
        cluster.engine(options, node=2, log_path=tmp_path / "log")
    with pytest.raises(RealError, match=r"needs GPUs up to 98, but node 0 has"):
        on_gpu = ServerOptions(str(tiny_model), device="cuda", gpus=(97,))
        cluster.engine(on_gpu, node=0, log_path=tmp_path / "log")
    with pytest.raises(RealError, match=r"rank \d+ needs slots up to 9, but node \d has 8"):
        cluster.ranks(17, factory=Rank)


def test_errors_of_a_rank_arrive_as_they_were_raised(cluster: Cluster, run: Run) -> None:
    (rank,) = cluster.ranks(1, factory=Rank)
    (unmade,) = cluster.ranks(1, factory=broken)

    async def scenario() -> None:
        with pytest.raises(RealError, match=r"^not today$"):
            await rank.call("refuse")
        with pytest.raises(RealError, match=r"^rank 0 has no weights$"):
            await unmade.call("where")
        with pytest.raises(RealError, match="trainer rank 0 is gone"):
            await rank.call("die")

    run(scenario())


def test_an_engine_that_cannot_start_says_why_from_its_node(
    cluster: Cluster, tiny_model: Path, tmp_path: Path, run: Run
) -> None:
    fails = (sys.executable, "-c", "raise SystemExit('no kernel for this GPU')")
    hosts = [
        cluster.engine(options, node=0, log_path=tmp_path / str(i))
        for i, options in enumerate((ServerOptions(str(tmp_path)), ServerOptions(str(tiny_model), command=fails)))
    ]

    async def scenario() -> None:
        with pytest.raises(RealError, match=r"has no config\.json"):
            await hosts[0].ready()
        with pytest.raises(EngineStartError, match="no kernel for this GPU"):
            await hosts[1].ready()
        os.kill(await hosts[1].run(os.getpid), signal.SIGKILL)
        with pytest.raises(EngineGone):
            await hosts[1].ready()

    run(scenario())


def test_closing_ends_what_was_started_and_leaves_the_ray_of_others(cluster: Cluster, two_nodes: Any, run: Run) -> None:
    (rank,) = cluster.ranks(1, factory=Rank)
    process = psutil.Process(run(rank.call("pid")))
    cluster.close()
    _, alive = psutil.wait_procs([process], timeout=60)
    assert not alive
    raylets = [node for node in two_nodes.list_all_nodes() if node.live_processes()]
    assert len(raylets) == 2


def test_an_address_without_a_cluster_is_refused() -> None:
    with pytest.raises(RealError, match=r"no Ray cluster at '127\.0\.0\.1:1'"):
        Cluster.start("127.0.0.1:1", slots=1)


def test_a_killed_driver_leaves_no_engine_and_no_ray_process(tiny_model: Path, tmp_path: Path) -> None:
    driver = f"""if True:
        import asyncio, os, sys
        from real.cluster import Cluster
        from real.engines.options import ServerOptions
        cluster = Cluster.start(None, slots=2)
        options = ServerOptions({str(tiny_model)!r}, max_total_tokens=1024, context_length=512)
        host = cluster.engine(options, node=None, log_path={str(tmp_path / "engine.log")!r})
        cluster.ranks(1, factory=lambda rank: rank)
        asyncio.run(host.ready())
        print("up", flush=True)
        sys.stdin.read()
    """
    with subprocess.Popen(
        [sys.executable, "-c", driver], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        family = psutil.Process(process.pid).children(recursive=True)
        names = " ".join(member.name() for member in family)
        for part in ("gcs_server", "raylet", "sglang::schedul", "sglang::detoken"):
            assert part in names
        process.kill()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
