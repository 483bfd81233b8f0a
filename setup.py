"""What `pip install` and `make compile` need beyond pyproject.toml: the hot modules can be compiled with mypyc.

Off unless TESTBED_COMPILE=1 is set (`make compile`), so no installation needs a C compiler. The sources are the same
either way, and so are the results, to the last bit. Modules that hold msgspec structs, exceptions or named tuples are
not in the list: mypyc makes native classes only of plain ones.
"""

from __future__ import annotations

import os

from setuptools import setup

HOT = {
    "sim": "admission_budget agenda brought driver engine engine_admission engine_decode engine_request "
    "engine_scheduler engine_state experience_store fleet radix_cache services tiered_cache tools weight_steps",
    "sim/costs": "analytic base calibrated linear measured segments speculation",
    "sim/serving": "costs",
    "testbed": "fields numbered",
    "testbed/core": "context core experience pools publication records rollouts",
    "testbed/policies": "admission buffer concurrency placement publication selection staleness",
    "testbed/policies/routing": "active_blocks affinity balancing base cost dynamo estimate hashing loads mooncake "
    "order preble prefix_tree prefixes split",
    "testbed/metrics": "batch gpu_time lanes run sketch staleness tokens trajectory updates waits",
}


DIRECT = ["-fvisibility=hidden", "-fno-plt"]
"""Functions of the extension call each other, and the interpreter, without a detour through a table."""


def extensions() -> list[object]:
    """The modules to compile; none unless asked for. Raises ImportError without mypy."""
    if os.environ.get("TESTBED_COMPILE") != "1":
        return []
    from mypyc.build import mypycify

    modules = [f"{folder}/{name}.py" for folder, names in HOT.items() for name in names.split()]
    options = ["--config-file=", "--ignore-missing-imports", "--no-warn-unused-ignores"]
    found = list(mypycify([*options, *modules], opt_level="2", debug_level="0"))
    if os.name == "posix":
        for extension in found:
            extension.extra_compile_args += DIRECT
    return found


setup(ext_modules=extensions())
