"""Several nodes on one machine: a Ray cluster that runs already, the engine on one of its nodes, the trainer on
another."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from testbed.core import actions as do
from testbed.core import events as said
from testbed.journal import read_journal
from tests.real.test_cli_real import ROOT, command_line, small_tree

NODES = """
import sys
from ray.cluster_utils import Cluster
node = {"num_cpus": 1, "resources": {"slot": 1}, "object_store_memory": 100 * 2**20}
machines = Cluster(initialize_head=True, head_node_args=node)
machines.add_node(**node)
print("ADDRESS", machines.address, flush=True)
sys.stdin.read()
machines.shutdown()
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of two nodes with one slot each."""
    process = subprocess.Popen(
        [sys.executable, "-c", NODES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None and process.stdin is not None
    yield next(line.split()[1] for line in process.stdout if line.startswith("ADDRESS"))
    process.stdin.close()
    process.wait(timeout=60)


@pytest.fixture
def spread(tmp_path: Path) -> Path:
    """One GPU a node: the engine's is on the first, the trainer's on the second."""
    tree = small_tree()
    tree["cluster"] |= {"nodes": 2, "gpus_per_node": 1}
    file = tmp_path / "spread.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def test_a_run_on_two_nodes_of_a_cluster_that_was_there_before(spread: Path, address: str) -> None:
    done = command_line("real", spread.name, "--address", address, "--out", "out", cwd=spread.parent)
    assert done.returncode == 0, done.stderr
    _, records = read_journal(spread.parent / "out" / "journal.jsonl.zst")
    seen = [x for r in records for x in (r.event, *r.actions)]
    assert sum(isinstance(x, said.TrainStepFinished) for x in seen) == 2
    assert [x.version for x in seen if isinstance(x, said.EngineResumed)] == [1, 2]
    assert isinstance(seen[-1], do.Finish)


def test_more_than_the_cluster_has_is_refused(spread: Path, address: str) -> None:
    wanted = "placement={mode: disaggregated, rollout_num_gpus: 2, actor_num_gpus: 1}"
    sets = ("--set", wanted, "--set", "cluster.gpus_per_node=2")
    done = command_line("real", spread.name, "--address", address, "--out", "out", *sets, cwd=spread.parent)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "needs slots up to 2, but node 0 has 1" in done.stderr
