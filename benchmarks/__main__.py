"""Runs every benchmark, each in a process of its own, and writes the figures and their plots."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.growth import exponent, series, y_of
from benchmarks.plot import draw
from testbed.compiled import compiled

MAIN = {
    "single_turn": ["single_turn", "100000"],
    "multi_turn": ["multi_turn", "20000"],
    "serving": ["serving", "10000"],
    "single_turn_journal_off": ["single_turn", "20000"],
    "single_turn_journal_sampled": ["single_turn", "20000", "--journal", "sampled"],
    "single_turn_journal_full": ["single_turn", "20000", "--journal", "full"],
    "skip": ["single_turn", "1024", "--engines", "16"],
    "iterate": ["single_turn", "1024", "--engines", "16", "--mode", "iterate"],
}


def run(name: str, arguments: list[str]) -> dict[str, Any]:
    print(f"{name}: {' '.join(arguments)} ...", flush=True)
    command = [sys.executable, "-m", "benchmarks.cases", *arguments]
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
    return {"arguments": " ".join(arguments), **result}


def growths(long: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The series with their fitted exponents, and every run behind them."""
    found, results = {}, []
    for s in series(long):
        points = []
        for x, arguments in s.points:
            result = run(f"growth with {s.name}", arguments)
            results.append(result)
            points.append((x if s.name != "rollouts" else result["rollouts"], y_of(s.per, result)))
        found[s.name] = {"x": s.x, "per": s.per, "exponent": exponent(points), "target": s.target, "points": points}
        print(f"  time grows with {s.name} to the power of {found[s.name]['exponent']:.3f}", flush=True)
    return found, results


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--json", metavar="FILE", type=Path, default=Path("benchmarks/results.json"), help="where the figures go"
    )
    parser.add_argument("--plot", metavar="FILE", type=Path, help="where the log-log plots go (SVG)")
    parser.add_argument("--quick", action="store_true", help="leave out 10^6 and 10^7 rollouts")
    options = parser.parse_args()
    if options.json.is_dir():
        parser.error(f"--json {options.json}: this is a folder, not a file")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    main_cases = {name: run(name, arguments) for name, arguments in MAIN.items()}
    growth, results = growths(not options.quick)
    by_rollouts = {r["arguments"]: r for r in results}
    single, multi = main_cases["single_turn"], main_cases["multi_turn"]
    figures: dict[str, Any] = {
        "single_turn_rollouts_per_cpu_s": single["rollouts_per_cpu_s"],
        "single_turn_events_per_turn": single["clock_events_per_turn"],
        "multi_turn_turns_per_cpu_s": multi["turns_per_cpu_s"],
        "multi_turn_events_per_turn": multi["clock_events_per_turn"],
        "multi_turn_engine_events_per_turn": multi["engine_events_per_turn"],
        "serving_requests_per_cpu_s": main_cases["serving"]["rollouts_per_cpu_s"],
        "single_turn_with_journal_rollouts_per_cpu_s": main_cases["single_turn_journal_full"]["rollouts_per_cpu_s"],
        "full_journal_cost": _cost(main_cases, "single_turn_journal_full", "single_turn_journal_off"),
        "sampled_journal_cost": _cost(main_cases, "single_turn_journal_sampled", "single_turn_journal_off"),
        "iterate_cost": _cost(main_cases, "iterate", "skip"),
        "iterate_differs_by_s": abs(main_cases["iterate"]["simulated_s"] - main_cases["skip"]["simulated_s"]),
    }
    for k in (5, 6, 7):
        result = by_rollouts.get(f"single_turn {10**k}")
        figures[f"peak_rss_mb_1e{k}"] = result["peak_rss_mb"] if result else None
    longest = by_rollouts.get(f"single_turn {10**7}")  # trains 10^7, and makes those that are dropped besides
    figures["rollouts_1e7_run_seconds"] = longest["wall_s"] if longest else None
    figures["rollouts_1e7_seconds"] = longest["wall_s"] * 10**7 / longest["rollouts"] if longest else None
    figures["growth"] = growth
    figures["compiled"] = bool(compiled())
    figures["machine"] = f"{platform.processor() or platform.machine()}, Python {platform.python_version()}"
    figures["cases"] = [*main_cases.values(), *results]
    options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(f"figures: {options.json}")
    if options.plot:
        draw(growth, options.plot)
        print(f"plots: {options.plot}")


def _cost(cases: dict[str, dict[str, Any]], name: str, base: str) -> float:
    """CPU seconds per rollout of one case, in those of another."""
    return float(cases[base]["rollouts_per_cpu_s"] / cases[name]["rollouts_per_cpu_s"])


if __name__ == "__main__":
    main()
