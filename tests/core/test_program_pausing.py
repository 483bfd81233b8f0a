"""AP-03, AP-04, AP-09, AP-11, AP-12 as the core shows them: programs that are paused and restored, with constants for
durations. A context is 100 tokens of prompt, 50 of output and 20 of observation per turn."""

from __future__ import annotations

from typing import Any

import pytest

from testbed.core import actions as do
from testbed.core import events as said
from testbed.core.core import Core
from testbed.core.errors import ProtocolError
from tests.support.invariants import replayed, watched
from tests.support.scenarios import scenario
from tests.support.scripted import Scripted

ONE_ENGINE: dict[str, Any] = {
    "placement": {"mode": "disaggregated", "rollout_num_gpus": 1, "actor_num_gpus": 1},
    "rollout__routing": {"type": "session_affinity"},
    "run__num_rollout": 1,
}


def programs(n: int, kv: int, turns: int = 3, rule: dict[str, Any] | None = None, **changes: Any) -> Scripted:
    """n programs of one engine with `kv` tokens, run to the end, invariants checked."""
    seconds = {k: changes.pop(k) for k in list(changes) if "__" not in k}
    options = {"type": "thunder_agent", "tick_s": 5.0, "acting_half_life_s": None} | (rule or {})
    algorithm = {"n_samples_per_prompt": 1, "rollout_batch_size": n}
    config = scenario(**ONE_ENGINE | {"algorithm": algorithm, "rollout__programs": options} | changes)
    run = Scripted(config, turns=turns, kv_tokens=kv, **seconds).run()
    watched(config, run.records)
    replayed(config, run.records)
    return run


def paused(run: Scripted) -> list[tuple[float, int, str]]:
    return [(t, a.trajectory, a.why) for t, a in run.of(do.PauseProgram)]


def restored(run: Scripted) -> list[tuple[float, int, str]]:
    return [(t, a.trajectory, a.why) for t, a in run.of(do.RestoreProgram)]


def test_with_room_for_all_nobody_is_paused() -> None:
    run = programs(4, kv=4 * (100 + 3 * 70))
    assert not paused(run) and not restored(run)


def test_ap_04_programs_are_let_in_while_their_contexts_fit() -> None:
    """250 tokens, prompts of 100: two are let in, the third waits, until at a look at memory one has ended."""
    run = programs(3, kv=250, turns=1, turn=7.0)
    assert paused(run) == [(0.0, 2, "no_room")] and restored(run) == [(10.0, 2, "room")]
    assert [(t, a.trajectory) for t, a in run.of(do.StartTurn)] == [(0, 0), (0, 1), (10, 2)]


def test_ap_09_the_acting_program_pauses_first_and_comes_back_when_there_is_room() -> None:
    """Turns of 4 and 20 s, tools of 30 s. At 5 s program 0 acts on 150 tokens and program 1 reasons on 100: 250 > 220,
    so 0 pauses, though 1 is shorter. It wants its next call at 34 s on 170 tokens; program 1 acts then on 150 (in full:
    nothing decays), from 50 s on it reasons on 170, and only its end at 70 s makes room."""
    run = programs(2, kv=220, turns=2, turn=lambda a: 4.0 if a.trajectory == 0 else 20.0, tool=30.0)
    assert paused(run) == [(5.0, 0, "over_capacity")]
    ends = {e.trajectory: t for t, e in run.of(said.TurnFinished) if not e.continues}
    assert ends[1] == 20 + 30 + 20 and restored(run) == [(70.0, 0, "room")] and ends[0] == 74.0


def test_ap_09_a_call_that_must_go_is_taken_back_or_marked() -> None:
    """Both reason when their contexts have outgrown 300 tokens (170 each, at 15 s): the rule takes one's call back, the
    deployed code marks it, and it pauses when its tool starts."""
    at_once = programs(2, kv=300, turns=3, tool=3.0)
    assert paused(at_once)[0] == (15.0, 0, "over_capacity")
    t, abort = at_once.of(do.AbortTurn)[0]
    assert (t, abort.trajectory, abort.why) == (15.0, 0, "paused")
    marked = programs(2, kv=300, turns=3, tool=3.0, rule={"pause_reasoning": "next_tool"})
    assert paused(marked)[0] == (23.0, 0, "marked") and not marked.of(do.AbortTurn)
    for run in (at_once, marked):
        sent = [(a.trajectory, a.turn) for _, a in run.of(do.StartTurn)]
        assert set(sent) == {(i, k) for i in range(2) for k in range(3)}
    assert len(marked.of(do.StartTurn)) == 6, "nothing is generated twice"


def test_ap_12_what_is_paused_keeps_its_environment() -> None:
    run = programs(4, kv=300, turns=3, environments=True)
    assert {why for _, _, why in paused(run)} >= {"over_capacity", "no_room"}
    prepared = [a.trajectory for _, a in run.of(do.PrepareEnvironment)]
    released = {a.trajectory: t for t, a in run.of(do.ReleaseEnvironment)}
    ends = {e.trajectory: t for t, e in run.of(said.TurnFinished) if not e.continues}
    assert sorted(prepared) == [0, 1, 2, 3] and released == ends


@pytest.mark.parametrize("ending", ["failed", "aborted"])
def test_ap_03_a_program_that_ends_while_it_is_paused_leaves_nothing_behind(ending: str) -> None:
    """A tool fails while its program is paused; an early stop gives up programs that are paused."""
    admission = {"type": "over_sampling", "over_sampling_ratio": 3.0, "long_rounds": False}
    changes = {"rollout__admission": admission} if ending == "aborted" else {}
    options = {"type": "thunder_agent", "tick_s": 5.0, "acting_half_life_s": None}
    config = scenario(
        **ONE_ENGINE
        | {"algorithm": {"n_samples_per_prompt": 1, "rollout_batch_size": 2}, "rollout__programs": options}
        | changes
    )
    run = Scripted(config, turns=2, kv_tokens=220, environments=True, turn=lambda a: 4.0 + 16 * a.trajectory, tool=30.0)
    run.tool_fails = lambda a: ending == "failed" and a.trajectory == 0
    run.run()
    watched(config, run.records)
    ends = {t: a.outcome for _, a in run.of(do.Retire) for t in a.trajectories}
    held = {a.trajectory for _, a in run.of(do.PauseProgram)} - {a.trajectory for _, a in run.of(do.RestoreProgram)}
    assert any(ends[t] == ending for t in held), "one ended while it was paused"
    left = run.core.rollouts.programs
    assert left is not None and not left.live and not left.waiting and not any(left._held)


@pytest.mark.parametrize("ahead, ready", [(0, 15.0 + 12.0), (1, 15.0), (None, 15.0)])
def test_ap_11_an_environment_that_is_prepared_while_its_program_waits_hides_the_shorter_of_both(
    ahead: int | None, ready: float
) -> None:
    """One slot's worth of KV: the second program waits 15 s (12 of preparation and 1 of generation, seen at the next
    look); its environment takes 12 s. Prepared ahead it starts at once, else 12 s later: min(12, 15) are hidden."""
    run = programs(2, kv=120, turns=1, turn=1.0, environments=True, environment=12.0, rule={"prepare_ahead": ahead})
    starts = {a.trajectory: t for t, a in run.of(do.StartTurn)}
    assert starts == {0: 12.0, 1: ready}


def test_a_call_that_ended_before_its_abort_came_counts() -> None:
    """It was asked for at 15 s and taken back; it ends with the same second."""
    options = {"type": "thunder_agent", "tick_s": 5.0, "acting_half_life_s": None}
    algorithm = {"n_samples_per_prompt": 1, "rollout_batch_size": 2}
    config = scenario(**ONE_ENGINE | {"algorithm": algorithm, "rollout__programs": options})
    run = Scripted(config, turns=3, kv_tokens=300, tool=3.0)
    run._on_AbortTurn = lambda a: run.at(run.now, lambda t: run._live[a.trajectory] and _end(run, a, t))  # type: ignore[attr-defined]
    run.run()
    watched(config, run.records)
    assert run.core.finished
    sent = [(a.trajectory, a.turn) for _, a in run.of(do.StartTurn)]
    assert len(sent) == len(set(sent)) == 6, "no call was sent twice"
    assert any(why == "over_capacity" for _, _, why in paused(run))


def _end(run: Scripted, a: do.AbortTurn, t: float) -> said.TurnFinished:
    del run._live[a.trajectory]
    spans = ((0, 0, run.tokens),)
    return said.TurnFinished(
        t, a.trajectory, a.turn, a.engine, 100, run.tokens, spans, 0, t, t, "stop", continues=a.turn < 2
    )


def test_ap_09_forced_restore_ends_every_pause() -> None:
    """One long program holds all memory; the other would wait for its end at 100 s."""
    late = programs(2, kv=120, turns=1, turn=lambda a: 100.0 if a.trajectory == 0 else 5.0)
    assert restored(late) == [(100.0, 1, "room")]
    turn = lambda a: 40.0 if a.trajectory == 0 else 6.0  # noqa: E731
    freed = programs(2, kv=210, turns=2, turn=turn, tool=60.0, rule={"forced_restore_s": 30.0})
    assert any(why == "overdue" for _, _, why in restored(freed))


def test_an_engine_that_is_lost_takes_its_programs_room_with_it() -> None:
    config = scenario(
        rollout__routing={"type": "session_affinity"},
        rollout__programs={"type": "thunder_agent"},
        algorithm={"n_samples_per_prompt": 1, "rollout_batch_size": 6},
        run__num_rollout=1,
    )
    run = Scripted(config, turns=3, kv_tokens=700)
    run.lose(7.0, 1)
    run.join(40.0, 1)
    run.run()
    watched(config, run.records)
    assert all(a.engine == 0 for t, a in run.of(do.RestoreProgram) if 7 < t < 40)


def test_a_backend_that_does_not_say_what_its_engines_hold_is_told_so() -> None:
    config = scenario(rollout__routing={"type": "session_affinity"}, rollout__programs={"type": "thunder_agent"})
    with pytest.raises(ProtocolError, match="RunStarted tells of 0 engines"):
        Core(config).handle(said.RunStarted(0.0))
