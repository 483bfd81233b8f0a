"""Which hot modules run compiled (`make compile`), and whether one of them is older than its source.

`python -m testbed.compiled` says so. It refuses to know which modules could be: `setup.py` lists them.
"""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("testbed", "sim")


def compiled(root: Path = ROOT) -> list[tuple[Path, Path]]:
    """(source, compiled module) of every module that is imported compiled, by path."""
    suffix = EXTENSION_SUFFIXES[0]
    found = [file for package in PACKAGES for file in (root / package).rglob(f"*{suffix}")]
    pairs = [(file.with_name(file.name.removesuffix(suffix) + ".py"), file) for file in found]
    return sorted(pair for pair in pairs if pair[0].is_file())


def outdated(root: Path = ROOT) -> list[Path]:
    """Sources that were changed after they had been compiled: what runs is not what they say."""
    return [source for source, module in compiled(root) if source.stat().st_mtime > module.stat().st_mtime]


def warning(root: Path = ROOT) -> str:
    """A sentence for the user; empty if every compiled module is as new as its source."""
    old = outdated(root)
    if not old:
        return ""
    names = ", ".join(str(source.relative_to(root)) for source in old[:3]) + (", ..." if len(old) > 3 else "")
    return f"{len(old)} compiled modules are older than their sources ({names}): run `make compile` or `make interpret`"


if __name__ == "__main__":
    print(f"{len(compiled())} modules run compiled" if compiled() else "all modules run interpreted")
    if warning():
        print(warning())
