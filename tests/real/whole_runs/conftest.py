"""Two engines and a trainer for whole runs, shared by this folder, and the contract suite's fixture over them. A run
takes seconds here, so one run answers all questions about its scenario."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from testbed.core import events as said
from testbed.scenario import Scenario
from tests.contract.backends import Backend
from tests.support.invariants import Record


@pytest.fixture(scope="package")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """See `tests/support/real_rig.py`."""
    from tests.support.real_rig import Rig

    rig = Rig(tmp_path_factory.mktemp("rig"))
    yield rig
    rig.close()


@pytest.fixture(scope="package")
def backend(rig: Any) -> Backend:
    from tests.support.real_rig import for_real

    known: dict[str, list[Record]] = {}

    def run(config: Scenario, faults: Sequence[said.Event]) -> list[Record]:
        key = config.model_dump_json()
        if key not in known:
            known[key] = rig.run(config, faults)
        return known[key]

    return Backend("real", "REAL", run, for_real, faults=False, deterministic=False)
