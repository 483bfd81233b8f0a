"""The requirements by id, and which tests show them on which backend.

A test names the ids it shows: `test_br_01_...`, `test_ws_02_and_07_...`, `test_pl_01_and_pl_03_...`. The backend
follows from the folder, or from `@pytest.mark.backend("SIM")`. This module knows names and counts; it runs nothing and
judges nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

GROUPS: Mapping[str, tuple[str, int]] = {
    "LM": ("learning math", 22),
    "ER": ("experience record", 18),
    "BR": ("buffer and readiness", 15),
    "PL": ("placement", 13),
    "AS": ("async and staleness", 16),
    "RK": ("routing and KV", 13),
    "QM": ("quantization and mismatch", 14),
    "AP": ("agent programs", 13),
    "WS": ("weight sync", 14),
    "OP": ("distillation and stages", 15),
    "RP": ("reporting and method", 13),
}
"""Group -> title, number of ids (01, 02, ...)."""

IDS: tuple[str, ...] = tuple(f"{group}-{n:02d}" for group, (_, count) in GROUPS.items() for n in range(1, count + 1))

_FIRST: Mapping[str, tuple[int, ...]] = {
    "LM": (
        4,
        5,
        7,
        11,
        12,
        15,
        16,
        17,
        19,
        21,
    ),
    "ER": (
        2,
        4,
        5,
        6,
        8,
        13,
        15,
    ),
    "BR": (
        1,
        4,
        5,
        6,
        8,
    ),
    "PL": (
        1,
        3,
        5,
        7,
    ),
    "AS": (
        1,
        2,
        3,
        5,
        6,
        10,
    ),
    "RK": (
        1,
        2,
        8,
    ),
    "QM": (
        1,
        2,
        4,
        6,
        8,
    ),
    "AP": (
        2,
        3,
        4,
        6,
    ),
    "WS": (
        1,
        3,
        4,
        5,
        6,
        8,
    ),
    "OP": (
        1,
        2,
        6,
        8,
        10,
        11,
    ),
    "RP": (
        6,
        12,
    ),
}

FIRST: frozenset[str] = frozenset(f"{group}-{n:02d}" for group, numbers in _FIRST.items() for n in numbers)
"""Those with a worked number or a rule that the sources insist on."""

BACKENDS = ("CORE", "SIM", "REAL")
FOLDERS: Mapping[str, str] = {"core": "CORE", "policies": "CORE", "sim": "SIM", "real": "REAL"}
"""Folder below tests/ -> backend; tests elsewhere (metrics, scenario, reports, ...) concern none of them: `OTHER`."""

OTHER = "OTHER"
_NAMED = re.compile(r"(?:^test_|_and_|_)(" + "|".join(GROUPS).lower() + r")_(\d\d)((?:_and_\d\d)*)(?=_|$)")


def ids_in(test: str) -> list[str]:
    """Ids that a test's function name shows. Raises ValueError for one that does not exist."""
    found = []
    for group, first, more in _NAMED.findall(test):
        for number in (first, *re.findall(r"\d\d", more)):
            found.append(f"{group.upper()}-{number}")
    if unknown := [i for i in found if i not in IDS]:
        raise ValueError(f"{test} names {', '.join(unknown)}, which is no requirement")
    return found


def backend_of(path: str) -> str:
    """Backend of a test file, from its path relative to the repository (`tests/core/test_x.py`)."""
    parts = path.replace("\\", "/").split("/")
    return FOLDERS.get(parts[1] if len(parts) > 2 else "", OTHER)


Outcome = tuple[str, str, bool]
"""Id, backend, whether the test passed."""


def shown(outcomes: Iterable[Outcome]) -> dict[str, set[str]]:
    """Id -> backends on which tests show it: some test passed there and none failed."""
    outcomes = set(outcomes)
    by_id: dict[str, set[str]] = {}
    for requirement, backend, passed in outcomes:
        if passed and (requirement, backend, False) not in outcomes:
            by_id.setdefault(requirement, set()).add(backend)
    return by_id


def table(shown: Mapping[str, Iterable[str]]) -> list[str]:
    """Lines of a table: per group how many ids have a test, in all and by backend, and which have none. `shown`: id ->
    backends."""
    columns = (*BACKENDS, OTHER)
    lines = [f"{'requirements with a passing test':36}{'any':>9}" + "".join(f"{c:>7}" for c in columns)]
    by_id = {i: set(shown.get(i, ())) for i in IDS}
    for group, (title, count) in GROUPS.items():
        mine = [by_id[f"{group}-{n:02d}"] for n in range(1, count + 1)]
        cells = "".join(f"{sum(c in b for b in mine):>7}" for c in columns)
        lines.append(f"{group} {title:33}{sum(map(bool, mine)):>4}/{count:<4}" + cells)
    covered = [i for i in IDS if by_id[i]]
    cells = "".join(f"{sum(c in b for b in by_id.values()):>7}" for c in columns)
    lines.append(f"{'all':36}{len(covered):>4}/{len(IDS):<4}" + cells)
    for label, missing in (
        ("without a test, first priority", [i for i in IDS if not by_id[i] and i in FIRST]),
        ("without a test, others", [i for i in IDS if not by_id[i] and i not in FIRST]),
    ):
        lines.append(f"{label}: {' '.join(missing) or 'none'}")
    return lines
