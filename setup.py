"""What `pip install` and `make compile` need beyond pyproject.toml: the hot modules can be compiled with mypyc.

Off unless TESTBED_COMPILE=1 is set. The sources are the same either way and so are the results, to the last bit; a
module that can't be compiled (no C compiler, no mypy) stays interpreted. Modules that hold msgspec structs, exceptions
or named tuples are not in the list: mypyc makes native classes only of plain ones.
"""

from __future__ import annotations

import os
import sys

from setuptools import setup

HOT = {
    "sim": "admission_budget agenda driver engine engine_admission engine_decode engine_request engine_scheduler "
    "engine_state experience_store fleet radix_cache services tools",
    "sim/costs": "analytic calibrated linear measured segments",
    "sim/serving": "costs",
    "testbed/core": "context core experience pools publication records rollouts",
    "testbed/policies": "admission buffer concurrency placement publication selection staleness",
    "testbed/policies/routing": "loads prefix_tree",
    "testbed/metrics": "gpu_time lanes run tokens trajectory updates waits",
}


def extensions() -> list[object]:
    """The compiled modules; none, with the reason on stderr, where mypyc is missing."""
    if os.environ.get("TESTBED_COMPILE") != "1":
        return []
    try:
        from mypyc.build import mypycify
    except ImportError as error:
        print(f"nothing is compiled: {error}", file=sys.stderr)
        return []
    modules = [f"{folder}/{name}.py" for folder, names in HOT.items() for name in names.split()]
    options = ["--config-file=", "--ignore-missing-imports", "--no-warn-unused-ignores"]
    made = mypycify([*options, *modules], opt_level="2", debug_level="0")
    for extension in made:
        extension.optional = True
    return list(made)


setup(ext_modules=extensions())
