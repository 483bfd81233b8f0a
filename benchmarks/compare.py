"""Two revisions, measured in turn (A B A B ...): the ratio of their CPU times, with its spread.

`python -m benchmarks.compare REV [--case multi_turn] [--rollouts N] [--pairs N]` compares the working tree with REV. A
pair's runs follow each other, so what else the machine does disturbs both alike; the median over pairs is robust
against the rest. Each side runs the benchmarks it came with, interpreted. It refuses to judge.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any


def cpu_per_turn(tree: Path, case: str, rollouts: int) -> float:
    """CPU seconds a turn of one run of the benchmarks in `tree`. Exits with the run's message if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, "-m", "benchmarks.cases", case, str(rollouts)]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed in {tree}:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return float(result["cpu_s"]) / int(result["turns"])


def git(*arguments: str, otherwise: str = "") -> str:
    """What git says; exits with its complaint, or with `otherwise`."""
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        print(otherwise or f"git {' '.join(arguments)}: {done.stderr.strip()}", file=sys.stderr)
        sys.exit(2)
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("revision", help="what the working tree is compared with: a commit, branch or tag")
    parser.add_argument("--case", default="single_turn")
    parser.add_argument("--rollouts", type=int, default=20_000)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    unknown = f"{options.revision!r} is no commit, branch or tag of this repository (such as main or HEAD~1)"
    commit = git("rev-parse", "--verify", "--quiet", f"{options.revision}^{{commit}}", otherwise=unknown)
    here = Path(git("rev-parse", "--show-toplevel"))
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder) / "tree"
        git("worktree", "add", "--quiet", "--detach", str(there), commit)
        try:
            ratios = []
            for pair in range(1, options.pairs + 1):
                before = cpu_per_turn(there, options.case, options.rollouts)
                after = cpu_per_turn(here, options.case, options.rollouts)
                ratios.append(after / before)
                print(
                    f"pair {pair}: {before * 1e6:.1f} us a turn at {commit[:9]}, {after * 1e6:.1f} us here, "
                    f"ratio {ratios[-1]:.3f}",
                    flush=True,
                )
        finally:
            git("worktree", "remove", "--force", str(there))
    print(
        f"{options.case}: CPU time here / at {commit[:9]}: median {median(ratios):.3f}, "
        f"{min(ratios):.3f} to {max(ratios):.3f} over {len(ratios)} pairs"
    )


if __name__ == "__main__":
    main()
