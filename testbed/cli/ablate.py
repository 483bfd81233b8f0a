"""The command that switches a scenario's savings off one at a time and says what time each one saves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from testbed.cli.app import Json, Overrides, VariantName, app
from testbed.console import complain, say


@app.command(short_help="Switch a scenario's savings off, one at a time: what time does each one save?")
def ablate(
    path: Annotated[Path, typer.Argument(metavar="SCENARIO", help="A scenario, or a study with --variant.")],
    set_: Overrides = None,
    variant: VariantName = None,
    json_: Json = None,
) -> None:
    """Simulate the scenario as it is and with prefix reuse, slot filling, speculation and program scheduling switched
    off, one at a time (those that it has). Saved time is per RL step and per trajectory, and by what a trajectory does
    in it. Prefix reuse is measured without program scheduling, which needs it."""
    from sim.run import simulate
    from testbed.commands import folders
    from testbed.commands.ablation import EVERY, Saved, figures, generated_s, saved, switches
    from testbed.commands.chosen import one
    from testbed.commands.errors import RunFailed
    from testbed.scenario import Scenario
    from testbed.scenario.errors import ScenarioError
    from testbed.scenario.rules import check

    chosen = one(path, set_ or (), variant)
    folders.target("--json", json_)
    done = {}
    wanted = switches(chosen.scenario)
    for name, changes in [(EVERY, {}), *((s.name, s.changes) for s in wanted)]:
        tree = chosen.scenario.model_dump(mode="json")
        for key, value in changes.items():
            section = tree
            *above, last = key.split(".")
            for part in above:
                section = section[part]
            section[last] = value
        config = Scenario.model_validate(tree)
        if refused := check(config, chosen.base_dir):
            raise ScenarioError(refused)
        complain(f"simulating: {name}")
        run = simulate(config, chosen.base_dir, name=name)
        if run.problem:
            raise RunFailed(f"{name}: {run.problem}")
        done[name] = run.summary
    savings: list[Saved] = [saved(s, done[s.name], done[s.against]) for s in wanted]
    every = done[EVERY]
    say(f"{chosen.scenario.name}: {every.step_time_mean_s:.2f} s a step, {generated_s(every):.2f} s a trajectory")
    say(f"{'saves':20}{'s a step':>12}{'s a trajectory':>16}   of it")
    for s in savings:
        largest = sorted(((v, k) for k, v in s.parts.items() if abs(v) >= 0.005), key=lambda x: -abs(x[0]))[:3]
        parts = ", ".join(f"{k} {v:+.2f}" for v, k in largest)
        say(f"{s.switch.saving:20}{s.step_s:>+12.2f}{s.trajectory_s:>+16.2f}   {parts}")
    folders.write_json(json_, figures(every, savings))
