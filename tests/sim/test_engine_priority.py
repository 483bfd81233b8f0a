"""Priority scheduling, preemption and `prefill_decode_interval`: who goes first, who goes back, when prefills wait.

Every batch takes one second, so the order of starts is the order of admission.
"""

from __future__ import annotations

import pytest

from sim.engine import EngineModel, EngineModelOptions, Finished
from tests.support.engine_play import UNIT, ask, engine, kinds, play, prefills

BOTH = pytest.mark.parametrize("mode", ["iterate", "skip"])


def starts(e: EngineModel, script: list) -> list:
    """Ids in the order in which the requests were first prefilled."""
    play(e, script)
    seen: list = []
    for batch in prefills(e):
        seen += [rid for rid, _, _ in batch if rid not in seen]
    return seen


def at(e: EngineModel, t: float, rid: str, priority: int | None, prompt: int = 20, outputs: int = 5) -> tuple:
    return t, lambda now: e.submit(now, ask(rid, prompt, outputs, priority=priority))


@BOTH
def test_higher_priorities_go_first_then_earlier_ones_and_none_is_the_lowest(mode: str) -> None:
    e = engine(mode, max_running_requests=1, enable_priority_scheduling=True, disable_priority_preemption=True)
    given = {"a": 1, "b": 5, "c": None, "d": 3, "e": 5}
    first = at(e, 0.0, "first", 0)
    assert starts(e, [first, *(at(e, 1.5, rid, p) for rid, p in given.items())]) == ["first", "b", "e", "d", "a", "c"]


@BOTH
def test_low_values_first_turns_the_order_round(mode: str) -> None:
    e = engine(
        mode,
        max_running_requests=1,
        enable_priority_scheduling=True,
        disable_priority_preemption=True,
        schedule_low_priority_values_first=True,
    )
    given = {"a": 1, "b": 5, "c": None, "d": -3}
    assert starts(e, [at(e, 0.0, "first", 0), *(at(e, 1.5, rid, p) for rid, p in given.items())]) == [
        "first",
        "d",
        "a",
        "b",
        "c",
    ]


@BOTH
@pytest.mark.parametrize(("priority", "preempts"), [(10, False), (11, True)])
def test_preemption_needs_more_than_the_threshold(mode: str, priority: int, preempts: bool) -> None:
    """One slot, taken by a request of priority 0; the threshold is 10."""
    e = engine(mode, max_running_requests=1, enable_priority_scheduling=True)
    said = play(e, [at(e, 0.0, "low", 0, outputs=20), at(e, 4.5, "high", priority)])
    order = [n.rid for n in said if isinstance(n, Finished)]
    assert order == (["high", "low"] if preempts else ["low", "high"])
    low = next(n for n in said if n.rid == "low")
    assert low.retractions == int(preempts)
    assert low.output_tokens == 20, "its outputs stay with it"
    if preempts:
        assert prefills(e)[1] == [["high", 0, 20]], "in the iteration that takes it in"
        assert prefills(e)[2] == [["low", 20, 4]], "prompt from the cache; the token in flight was thrown away"


@BOTH
def test_the_victim_is_the_lowest_and_of_equals_the_latest(mode: str) -> None:
    e = engine(mode, max_running_requests=3, enable_priority_scheduling=True)
    running = [at(e, 0.1 * i, rid, p, outputs=30) for i, (rid, p) in enumerate([("a", 5), ("b", 1), ("c", 1)])]
    said = {n.rid: n for n in play(e, [*running, at(e, 8.5, "high", 50)])}
    assert {rid: n.retractions for rid, n in said.items()} == {"a": 0, "b": 0, "c": 1, "high": 0}


@BOTH
def test_memory_alone_preempts_nobody(mode: str) -> None:
    """300 slots, rows to spare: `high` does not fit beside what `low` is expected to ask for, and waits for its end.

    SGLang looks for victims only once the latch is set, which a pass begins without.
    """
    e = engine(mode, max_total_num_tokens=300, max_running_requests=4, enable_priority_scheduling=True)
    said = play(
        e,
        [
            at(e, 0.0, "low", 0, outputs=200),
            at(e, 6.5, "other", 0, prompt=120, outputs=60),
            at(e, 8.5, "high", 60, prompt=120, outputs=60),
        ],
    )
    assert [n.rid for n in said] == ["low", "high", "other"]
    assert not any(n.retractions for n in said)


@BOTH
def test_retraction_by_priority_spares_the_higher_one_with_fewer_outputs(mode: str) -> None:
    """Without it the victim is the request with the fewest outputs."""
    victims = {}
    for policy in ("length", "priority"):
        e = engine(
            mode,
            max_total_num_tokens=120,
            enable_priority_scheduling=True,
            disable_priority_preemption=True,
            retraction_policy=policy,
            schedule_conservativeness=0.02,
        )
        script = [
            (0.0, lambda t, e=e: e.submit(t, ask("early", 20, 30, 80, priority=1))),
            (3.5, lambda t, e=e: e.submit(t, ask("middle", 20, 30, 40, priority=2))),
            (5.5, lambda t, e=e: e.submit(t, ask("late", 20, 30, 40, priority=3))),
        ]
        victims[policy] = [n.rid for n in sorted(play(e, script), key=lambda n: str(n.rid)) if n.retractions]
    assert victims == {"length": ["late"], "priority": ["early"]}


@BOTH
def test_prefills_keep_their_distance(mode: str) -> None:
    """Two chunks and a later prompt, each followed by at least three iterations without a prefill."""
    e = engine(mode, chunked_prefill_size=64, prefill_decode_interval=3)
    said = play(e, [at(e, 0.0, "a", 1, outputs=40), at(e, 5.5, "b", 1, prompt=128), at(e, 6.5, "c", 1)])
    assert kinds(e).startswith("P" + "D" * 5 + "PDDD" + "PDDD" + "PDDD")
    assert len(said) == 3


@BOTH
def test_a_small_batch_is_not_protected(mode: str) -> None:
    e = engine(mode, chunked_prefill_size=64, prefill_decode_interval=3, prefill_decode_interval_min_bs=2)
    play(e, [at(e, 0.0, "a", 1, outputs=40), at(e, 5.5, "b", 1, prompt=128), at(e, 6.5, "c", 1)])
    assert kinds(e).startswith("PDDDDD" + "PP" + "DDDP"), "with `b` there are two, and `c` waits"


@BOTH
def test_the_last_request_is_aborted_when_a_half_prefilled_one_holds_its_slots(mode: str) -> None:
    """300 slots: 200 belong to the first chunk of `long`, so `only` can hold 100 while decode steps go on."""
    e = engine(
        mode,
        max_total_num_tokens=300,
        chunked_prefill_size=200,
        prefill_decode_interval=50,
        schedule_conservativeness=0.02,
    )
    script = [
        (0.0, lambda t: e.submit(t, ask("only", 20, 150, 160))),
        (4.5, lambda t: e.submit(t, ask("long", 210, 4, 5))),
    ]
    said = {n.rid: n for n in play(e, script)}
    assert said["only"].reason == "out_of_memory"
    assert 20 + said["only"].output_tokens <= 100
    assert said["long"].output_tokens == 4


def test_priorities_under_another_policy_are_refused() -> None:
    with pytest.raises(ValueError, match="enable_priority_scheduling with schedule_policy 'lpm': fcfs is modelled"):
        EngineModel(EngineModelOptions(1000, schedule_policy="lpm", enable_priority_scheduling=True), UNIT)
    with pytest.raises(ValueError, match="retraction_policy 'priority' is length, or priority with enable_priority"):
        EngineModel(EngineModelOptions(1000, retraction_policy="priority"), UNIT)
