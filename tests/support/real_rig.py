"""Two real engines and a trainer of two ranks, brought up once and reused: any small scenario can be run on them.

Runs live on one event loop in a thread of its own, because clients and actors belong to a loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from real.deployment import Deployment, deployed, model_of
from real.driver import RealBackend
from testbed.core import actions as do
from testbed.core import events as said
from testbed.scenario import Scenario
from tests.support.invariants import Record
from tests.support.scenarios import put, scenario

DEVICE = os.environ.get("RL_TESTBED_RIG_DEVICE", "cpu")
"""`cuda`: the same suite on a machine's GPU, which all roles share (`scripts/gpu_check.sh`)."""

REAL: dict[str, Any] = {
    "cluster.gpu": "CPU" if DEVICE == "cpu" else "H200",
    "model": {"type": "preset", "name": "tiny-qwen3"},
    "rollout.engine": {
        "weight_precision": "fp32",
        "max_total_num_tokens": 16384,
        "max_running_requests": 16,
        "context_length": 2048,
        "mem_fraction_static": 0.2,
    },
    "training.precision": "fp32",
    "training.max_tokens_per_gpu": 4096,
    "real": {"device": DEVICE, "oversubscribe": DEVICE != "cpu", "watchdog_s": 60.0, "optimizer": {"lr": 1e-3}},
}
"""What makes a scenario of the suite one for real engines on this machine."""

SMALL: dict[str, dict[str, int]] = {
    "colocated": {"num_gpus": 2},
    "disaggregated": {"rollout_num_gpus": 2, "actor_num_gpus": 2},
    "hybrid": {"rollout_num_gpus": 1, "actor_num_gpus": 1},
}
"""Two engines in every placement."""

LENGTHS = {"prompt": 8, "reply": 10, "observation": 4}
"""Divisors: a real token takes milliseconds, and the suite's questions do not depend on how many there are."""


def for_real(config: Scenario) -> Scenario:
    """The same system on CPU engines with a tiny model: shorter texts, shorter waits, nothing else."""
    tree = config.model_dump(mode="json")
    keep = {k: v for k, v in tree["rollout"]["engine"].items() if k == "weight_precision" and v in ("fp8", "int8")}
    for key, value in REAL.items():
        put(tree, key, value)
    tree["rollout"]["engine"] |= keep
    asked = config.rollout.engine.max_total_num_tokens
    if asked and tree["rollout"]["programs"]["type"] == "thunder_agent":
        # the engines hold more than is asked for: programs get as much of it as their shorter texts need
        room = asked / LENGTHS["prompt"] / REAL["rollout.engine"]["max_total_num_tokens"]
        tree["rollout"]["programs"] |= {"pause_above": room, "pause_to": room}
    tree["placement"] |= SMALL[config.placement.mode]
    w = tree["workload"]
    for name, by in LENGTHS.items():
        for field in ("tokens", "low", "high", "mean"):
            if field in w[name]:
                w[name][field] = max(w[name][field] // by, 1 if name != "observation" else 0)
    w["max_response_length"] = max(w["max_response_length"] // 10, 8)
    for wait in (w["tool_time"], w["rewards"]["latency"]):
        for field in ("seconds", "mean_s"):
            if field in wait:
                wait[field] /= 20
    return Scenario.model_validate(tree)


def scoring_model(start: Path, folder: Path) -> Path:
    """A model with a value head of random numbers: its rewards mean nothing, and differ."""
    import torch
    from transformers import AutoModelForTokenClassification

    model = AutoModelForTokenClassification.from_pretrained(start, num_labels=1)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    return folder


class Rig:
    """Close it in the end. `folder`: for weights, logs and the start checkpoint."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="real-rig", daemon=True)
        self._thread.start()
        self._stack = AsyncExitStack()
        # every role is there; a run uses those that its algorithm asks for
        base = for_real(scenario(algorithm__advantage="critic", **changes))
        teacher = model_of(base, folder).path
        self.reward_model = scoring_model(teacher, folder / "reward-model")
        roles = {"teachers": (str(teacher),), "reward_model": str(self.reward_model)}
        base = base.model_copy(update={"real": base.real.model_copy(update=roles)})
        try:
            self.deployment: Deployment = self.wait(
                self._stack.enter_async_context(deployed(base, folder, folder.resolve()))
            )
        except BaseException:
            self.close()
            raise

    def wait(self, work: Coroutine[Any, Any, Any], timeout_s: float = 600.0) -> Any:
        """The result of a coroutine on the rig's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def run(self, config: Scenario, faults: Iterable[said.Event] = ()) -> list[Record]:
        """What a real run of this scenario (see `for_real`) did."""
        return self.backend(config, faults)[1]

    def backend(self, config: Scenario, faults: Iterable[said.Event] = ()) -> tuple[RealBackend, list[Record]]:
        """As `run`, with the backend for further questions."""
        return self.wait(self._run(config, tuple(faults)))

    async def _run(self, config: Scenario, faults: tuple[said.Event, ...]) -> tuple[RealBackend, list[Record]]:
        records: list[Record] = []

        def observe(event: said.Event, actions: list[do.Action]) -> None:
            records.append((event, list(actions)))

        await self.deployment.reset(config)
        backend = RealBackend(config, self.deployment, [observe], faults)
        await backend.run()
        return backend, records

    def close(self) -> None:
        self.wait(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
