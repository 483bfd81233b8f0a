"""Runs every benchmark, each in a process of its own, and writes the figures."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

QUICK = [("single_turn", 100_000), ("multi_turn", 20_000), ("single_turn_journal", 20_000)]
LONG = [("single_turn", 1_000_000), ("single_turn", 10_000_000)]


def run(case: str, rollouts: int) -> dict[str, Any]:
    print(f"{case}, {rollouts:,} rollouts ...", flush=True)
    command = [sys.executable, "-m", "benchmarks.cases", case, str(rollouts)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(
        f"  {result['rollouts_per_cpu_s']:,.0f} rollouts and {result['turns_per_cpu_s']:,.0f} turns per CPU-second, "
        f"{result['clock_events_per_turn']:.2f} clock and {result['core_events_per_turn']:.2f} core events a turn, "
        f"{result['peak_rss_mb']:.0f} MB, {result['wall_s']:.1f} s",
        flush=True,
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--json", metavar="FILE", type=Path, default=Path("benchmarks/results.json"), help="where the figures go"
    )
    parser.add_argument("--quick", action="store_true", help="leave out 10^6 and 10^7 rollouts")
    options = parser.parse_args()
    if options.json.is_dir():
        parser.error(f"--json {options.json}: this is a folder, not a file")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    results = [run(case, n) for case, n in QUICK]
    figures: dict[str, Any] = {
        "single_turn_rollouts_per_cpu_s": results[0]["rollouts_per_cpu_s"],
        "single_turn_events_per_turn": results[0]["clock_events_per_turn"],
        "multi_turn_turns_per_cpu_s": results[1]["turns_per_cpu_s"],
        "multi_turn_events_per_turn": results[1]["clock_events_per_turn"],
        "multi_turn_engine_events_per_turn": results[1]["engine_events_per_turn"],
        "single_turn_with_journal_rollouts_per_cpu_s": results[2]["rollouts_per_cpu_s"],
        "peak_rss_mb_1e5": results[0]["peak_rss_mb"],
        "peak_rss_mb_1e6": None,
        "peak_rss_mb_1e7": None,
        "rollouts_1e7_seconds": None,
    }
    if not options.quick:
        for case, n in LONG:
            result = run(case, n)
            results.append(result)
            figures[f"peak_rss_mb_1e{len(str(n)) - 1}"] = result["peak_rss_mb"]
        figures["rollouts_1e7_seconds"] = results[-1]["wall_s"]
    figures["machine"] = f"{platform.processor() or platform.machine()}, Python {platform.python_version()}"
    figures["cases"] = results
    options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(f"figures: {options.json}")


if __name__ == "__main__":
    main()
