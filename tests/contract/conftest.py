"""One fixture: every test of the contract suite runs once for each backend."""

from __future__ import annotations

import pytest

from tests.contract.backends import BACKENDS, Backend


@pytest.fixture(params=[pytest.param(b, id=b.name, marks=pytest.mark.backend(b.tag)) for b in BACKENDS])
def backend(request: pytest.FixtureRequest) -> Backend:
    chosen: Backend = request.param
    return chosen
