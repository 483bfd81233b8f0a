"""Where processes run: engines and trainer ranks as Ray actors on the nodes of a cluster, embedded by default.

Responsible for starting (or joining) Ray, for placing actors on nodes by resources, and for ending what it started:
also when this process is killed, an embedded cluster goes with it (the kernel kills Ray's own processes with their
parent, workers end with their raylet, engines with their worker). Refuses to know what engines and ranks compute.

A `slot` stands for a GPU on machines without one. On GPUs, processes name the indices they use, because roles that
share a GPU must name the same one; Ray's own GPU accounting would keep them apart."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from real.engines.options import ServerOptions, python_path
from real.engines.server import EngineServer
from real.errors import EngineGone, RealError

SLOT = "slot"
OBJECT_STORE_BYTES = 200 * 2**20
"""Weights and records do not travel through Ray's store; the smallest that Ray is comfortable with."""
_RAY_ENV = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # 15 otherwise, and engines would inherit it: they wait for whatever else runs
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # leave CUDA_VISIBLE_DEVICES to the processes
}
_REAPER = (
    "import sys, psutil\n"
    "members = [psutil.Process(int(pid)) for pid in sys.argv[1:] if psutil.pid_exists(int(pid))]\n"
    "sys.stdin.buffer.read()\n"  # returns when the driver is gone, or has closed the cluster
    "for member in members:\n"
    "    try: member.kill()\n"
    "    except psutil.NoSuchProcess: pass\n"
)
"""Kills the processes of an embedded cluster once its driver is gone. Most die with the driver, but Ray's agents first
spend a minute on telling a dead server about it."""


class Cluster:
    """A Ray cluster as the backend uses it. Make one with `start` from the main thread; close it in the end."""

    def __init__(
        self, nodes: list[dict[str, Any]], owns_ray: bool, remote: bool, reaper: subprocess.Popen[bytes] | None
    ) -> None:
        self._nodes = nodes
        self._owns_ray = owns_ray
        self._remote = remote
        self._used: defaultdict[int, float] = defaultdict(float)
        self._reaper = reaper
        self._hosts: list[EngineHost] = []
        self._ranks: list[RankHandle] = []

    @classmethod
    def start(cls, address: str | None, slots: int) -> Cluster:
        """Start an embedded one-node cluster with `slots` slots, or join the one at `address` (`auto`, `host:port`),
        whose nodes bring their own (`ray start --resources '{"slot": 4}'`, or GPUs). A Ray that this process has
        joined already is used and left running.

        Raises:
            RealError: there is no cluster at `address`.
        """
        os.environ |= {name: os.environ.get(name, value) for name, value in _RAY_ENV.items()}
        owns, reaper = not ray.is_initialized(), None
        if owns and address is None:
            before = _children()
            ray.init(
                address="local",
                num_cpus=1,  # Ray keeps this many workers warm, 100 MB each; actors here ask for no CPU
                resources={SLOT: slots},
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
            command = [sys.executable, "-c", _REAPER, *(str(pid) for pid in _children() - before)]
            reaper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        elif owns:
            _reach(address)
            try:
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise _no_cluster(address, str(error).splitlines()[0]) from None
        here = ray.get_runtime_context().get_node_id()
        nodes = [node for node in ray.nodes() if node["Alive"]]
        nodes.sort(key=lambda n: (n["NodeID"] != here, n["NodeManagerAddress"], n["NodeManagerPort"]))
        return cls(nodes, owns, remote=address is not None, reaper=reaper)

    @property
    def nodes(self) -> int:
        """Nodes, numbered 0 .. nodes-1; 0 is the one this process is on."""
        return len(self._nodes)

    def gpus(self, node: int) -> int:
        """GPUs of a node."""
        return int(self._nodes[node]["Resources"].get("GPU", 0))

    def node_id(self, node: int) -> str:
        """Ray's id of a node."""
        return str(self._nodes[node]["NodeID"])

    def engine(self, options: ServerOptions, *, node: int | None, log_path: str | Path) -> EngineHost:
        """Start a server on a node (None: the one with most slots free), taking `tp_size` slots; `log_path` is a path
        of that node. Returns at once; `ready` of the host waits.

        Raises:
            RealError: the node has fewer slots or GPUs than that.
        """
        node = self._take(node, options.tp_size, options.gpus, options.device == "cuda", f"engine {log_path}")
        if self._remote:  # the driver may be on another machine
            options = replace(options, host=self._nodes[node]["NodeManagerAddress"])
        actor = self._actor(_EngineActor, node, options.tp_size, options.device, concurrency=4)
        slots = 0 if options.device == "cuda" else options.tp_size
        host = EngineHost(actor.remote(options, str(log_path)), node, slots)
        self._hosts.append(host)
        return host

    def drop(self, host: EngineHost) -> None:
        """Give up an engine whose server is gone: the process that owned it ends, its slots are free."""
        ray.kill(host.actor)
        self._hosts.remove(host)
        self._used[host.node] -= host.slots

    def ranks(
        self,
        n: int,
        *,
        factory: Callable[[int], Any],
        nodes: Sequence[int | None] = (None,),
        device: str = "cpu",
        gpus: Sequence[int] = (),
    ) -> list[RankHandle]:
        """Start n processes; rank r builds `factory(r)` once, on `nodes[r % len(nodes)]`, and takes one slot, or on
        `cuda` sees only GPU `gpus[r]`. The factory must be picklable.

        Raises:
            RealError: a node has fewer slots or GPUs than that.
        """
        if device == "cuda" and len(gpus) != n:
            raise RealError(f"{n} ranks on GPUs need as many GPU indices, got {tuple(gpus)}")
        places, before = [], self._used.copy()
        own = [tuple(gpus[rank : rank + 1]) if device == "cuda" else () for rank in range(n)]
        try:  # all of them, before the first is started
            for rank in range(n):
                places.append(self._take(nodes[rank % len(nodes)], 1, own[rank], device == "cuda", f"rank {rank}"))
        except RealError:
            self._used = before
            raise
        handles = []
        for rank, node in enumerate(places):
            env = {"CUDA_VISIBLE_DEVICES": str(own[rank][0])} if own[rank] else {}
            actor = self._actor(_RankActor, node, 1, device, concurrency=1)
            handles.append(RankHandle(actor.remote(factory, rank, env), rank, node))
        self._ranks += handles
        return handles

    def close(self) -> None:
        """Stop engines and ranks, and Ray if `start` started or joined it. May be called twice."""
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get([host.actor.stop.remote() for host in self._hosts])
        for actor in [host.actor for host in self._hosts] + [rank.actor for rank in self._ranks]:
            ray.kill(actor)
        self._hosts, self._ranks = [], []
        if self._owns_ray and ray.is_initialized():
            ray.shutdown()
        if self._reaper is not None:
            self._reaper.communicate()
            self._reaper = None

    def _take(self, node: int | None, slots: int, gpus: tuple[int, ...], cuda: bool, who: str) -> int:
        """The node to use; its slots are taken. GPUs are only checked: roles may share them."""
        kind = "GPU" if cuda else SLOT
        have = [node["Resources"].get(kind, 0.0) for node in self._nodes]
        if node is None:
            node = max(range(self.nodes), key=lambda i: (have[i] - self._used[i], -i))
        if not 0 <= node < self.nodes:
            raise RealError(f"{who}: node {node} of a cluster of {self.nodes} (0 .. {self.nodes - 1})")
        wanted = max(gpus, default=slots - 1) + 1 if cuda else self._used[node] + slots
        if wanted > have[node]:
            noun = "GPUs" if cuda else "slots"
            raise RealError(f"{who} needs {noun} up to {wanted:g}, but node {node} has {have[node]:g}")
        self._used[node] += 0 if cuda else slots
        return node

    def _actor(self, cls: Any, node: int, slots: int, device: str, concurrency: int) -> Any:
        return ray.remote(cls).options(
            num_cpus=0,
            resources={} if device == "cuda" else {SLOT: slots},
            scheduling_strategy=NodeAffinitySchedulingStrategy(self.node_id(node), soft=False),
            max_concurrency=concurrency,
            runtime_env={"env_vars": {"PYTHONPATH": python_path(os.environ.get("PYTHONPATH")), "OMP_NUM_THREADS": "1"}},
        )


def _children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def _reach(address: str | None) -> None:
    """Refuse an address at which nobody listens: `ray.init` would go on trying for minutes."""
    host, colon, port = (address or "").rpartition(":")
    if colon:
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except (OSError, ValueError, OverflowError) as error:
            raise _no_cluster(address, str(error)) from None


def _no_cluster(address: str | None, why: str) -> RealError:
    return RealError(
        f"no Ray cluster at {address!r} ({why}): give `auto` or host:port, start one with `ray start --head`, "
        "or leave the address out for an embedded one"
    )


class EngineHost:
    """Driver-side handle of one engine and of the process on its node that owns it.

    Methods raise `EngineGone` if that process is gone."""

    def __init__(self, actor: Any, node: int, slots: int) -> None:
        self.actor = actor
        self.node = node
        self.slots = slots
        self.url = ""
        """Empty until `ready` has returned."""

    async def ready(self, timeout_s: float = 300.0) -> str:
        """Wait until the engine serves; its URL.

        Raises:
            RealError: the model path is none, or there are too few GPUs.
            EngineStartError: port taken, or the server ended; with its last log lines.
        """
        self.url = await _result(self.actor.ready.remote(timeout_s))
        return self.url

    async def pid(self) -> int:
        return int(await _result(self.actor.get.remote("pid")))

    async def exit_code(self) -> int | None:
        """None while the server runs."""
        code: int | None = await _result(self.actor.get.remote("exit_code"))
        return code

    async def log_tail(self, n: int = 20) -> str:
        return str(await _result(self.actor.log_tail.remote(n)))

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)` in the process on the engine's node (files of that node); both picklable."""
        return await _result(self.actor.run.remote(function, *args))

    async def stop(self) -> None:
        """End the server; the process on the node stays until the cluster is closed."""
        await _result(self.actor.stop.remote())


class RankHandle:
    """Driver-side handle of one rank. Calls are carried out one after the other, in the order sent."""

    def __init__(self, actor: Any, rank: int, node: int) -> None:
        self.actor = actor
        self.rank = rank
        self.node = node

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """`method` of the rank's object; sent before this first waits. Errors are raised as they are.

        Raises:
            RealError: the rank's process is gone.
        """
        try:
            return await _result(self.actor.call.remote(method, args, kwargs))
        except EngineGone as gone:
            raise RealError(f"trainer rank {self.rank} is gone: {gone}") from None


async def _result(reference: Any) -> Any:
    """Wait for an actor's answer; errors of the actor's code are raised as they were there."""
    try:
        return await asyncio.wrap_future(reference.future())
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayActorError as error:
        raise EngineGone(" ".join(str(error).split())) from None


class _EngineActor:
    """Owns one server. Starts it when it is made: in the actor's main thread, which lives as long as the actor."""

    def __init__(self, options: ServerOptions, log_path: str) -> None:
        self._server: EngineServer | None = None
        self._failure: Exception | None = None
        try:
            self._server = EngineServer.start(options, log_path)
        except Exception as error:  # raised where it can be reported: by whoever waits
            self._failure = error

    @property
    def server(self) -> EngineServer:
        if self._server is None:
            raise self._failure or RealError("the engine was not started")
        return self._server

    def ready(self, timeout_s: float) -> str:
        return self.server.wait_ready(timeout_s)

    def get(self, name: str) -> Any:
        return getattr(self.server, name)

    def log_tail(self, n: int) -> str:
        return self.server.log_tail(n)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()


class _RankActor:
    """Builds the rank's object and calls its methods by name."""

    def __init__(self, factory: Callable[[int], Any], rank: int, env: dict[str, str]) -> None:
        os.environ |= env  # before anything touches a GPU
        self._failure: Exception | None = None
        try:
            self._object = factory(rank)
        except Exception as error:  # an actor that fails to be made loses its message
            self._failure = error

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._failure is not None:
            raise self._failure
        return getattr(self._object, method)(*args, **kwargs)
