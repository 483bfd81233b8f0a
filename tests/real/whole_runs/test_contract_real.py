"""The contract suite of `tests/contract`, asked of the real backend: the same test functions, another fixture."""

from tests.contract.test_contract import *  # noqa: F403
