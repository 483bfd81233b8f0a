"""What the report claims, and what it must not claim."""

import pytest

from reports import VariantRuns, build_comparison
from reports.answer import answer, price_of_it, rests_on
from reports.headings import headings, update_heading
from reports.limits import limits
from reports.sentences import Number, as_text
from reports.view import view_of
from testbed.metrics.summary import TrajectoryTime, WeightUpdate
from tests.reports.invented import COLOCATED, LOOSE, comparison, run, variant

NB = "\u00a0"


def two(first, second, seeds=3, noise=0.0, **options):
    """A comparison of two variants given as (name, lanes, stretch); times differ over seeds by ± noise."""

    def runs(name, lanes, stretch):
        wiggle = [0.0] if seeds == 1 else [noise * (2 * i / (seeds - 1) - 1) for i in range(seeds)]
        return [run(name, lanes, seed=i + 1, stretch=stretch * (1 + w), **options) for i, w in enumerate(wiggle)]

    return view_of(
        build_comparison(
            study="s", question="q", variants=[VariantRuns("", x[0], "", runs(*x)) for x in (first, second)]
        )
    )


def said(view):
    return as_text(answer(view)).replace(NB, " ")


def test_the_answer_names_layout_number_baseline_staleness_and_cost():
    text = said(view_of(comparison()))
    assert text.startswith(
        "Split the GPUs 40 + 24 and run async with η = 2 (D): 248 s per step instead of 329 s with colocated-sync (A)"
    )
    assert "less time and money ($11," in text and text.endswith("at a staleness of 1.8 on average and 2 at most.")


def test_as_10_the_answer_is_followed_by_its_price():
    text = as_text(price_of_it(view_of(comparison()))).replace(NB, " ")
    assert text.startswith(
        "It drops 7.4 % of what it generates, and stays the cheaper run while it needs fewer than 1.3"
    )
    assert text.endswith("the steps of A (break-even). Reward is not simulated.")


def test_break_even_is_the_ratio_of_costs():
    view = two(("slow", COLOCATED, 1.5), ("fast", COLOCATED, 1.0))
    assert f"1.50{NB}× the steps of A" in as_text(price_of_it(view))


def test_a_tie_with_the_baseline_is_said_and_nothing_is_claimed():
    view = two(("one", COLOCATED, 1.0), ("other", COLOCATED, 0.99), noise=0.03)
    text = said(view) + as_text(price_of_it(view))
    assert "tie" in text and "within the spread over 3 seeds" in text
    assert "less" not in text and "cheaper" not in text and "break-even" not in text


def test_the_same_difference_is_claimed_once_the_spread_is_small():
    view = two(("one", COLOCATED, 1.0), ("other", COLOCATED, 0.97), noise=0.001)
    assert "3.0 % less time and money" in said(view)


@pytest.mark.parametrize(("stretch", "claimed"), [(0.96, False), (0.9, True)])
def test_with_one_seed_only_differences_above_five_percent_are_claimed(stretch, claimed):
    view = two(("one", COLOCATED, 1.0), ("other", COLOCATED, stretch), seeds=1)
    assert ("less time and money" in said(view)) is claimed
    assert "one seed, no spread" in as_text(rests_on(view))
    assert any(as_text(what) == "One seed, no spread." for what, _ in limits(view))


def test_two_that_tie_below_the_baseline_are_both_named():
    runs = [
        VariantRuns("", name, "", [run(name, COLOCATED, seed=s, stretch=k * (1 + 0.01 * (s - 2))) for s in (1, 2, 3)])
        for name, k in (("base", 1.5), ("left", 1.0), ("right", 1.005))
    ]
    text = said(view_of(build_comparison(study="s", question="q", variants=runs)))
    assert text.startswith("B and C tie") and "33 % less time and money" in text


def test_the_baseline_may_win():
    view = two(("base", COLOCATED, 1.0), ("dear", COLOCATED, 1.2))
    # the causes of the colocated lane add up to 328 s
    assert said(view).startswith("Stay with base (A): 328 s per step") and "costs 20 % more" in said(view)
    assert "break-even" not in as_text(price_of_it(view))


def test_without_a_price_time_decides_and_no_money_is_printed():
    view = two(("a", COLOCATED, 1.0), ("b", COLOCATED, 0.5), cost_usd_per_1000_steps=0.0)
    assert "$" not in said(view) and "50 % less time" in said(view) and "money" not in said(view)


def test_equal_layouts_are_told_apart_by_name():
    view = two(("cuda_ipc, flush", COLOCATED, 1.0), ("cuda_ipc, keep", COLOCATED, 0.8))
    assert said(view).startswith("Run cuda_ipc, keep (B)")


def test_every_heading_states_its_number_with_a_kind():
    heads = headings(view_of(comparison()))
    assert set(heads) == {"gpu", "staleness", "trajectory", "update"}
    for sentence in heads.values():
        assert any(isinstance(p, Number) and p.kind == "simulated" for p in sentence)


def test_as_07_the_staleness_heading_gives_the_buffers_part():
    text = as_text(headings(view_of(comparison()))["staleness"])
    # dequeue mean (115 + 2 x 525) / 640 = 1.82, completion mean (489 + 2 x 45) / 640 = 0.90
    assert text.startswith("The buffer adds 0.9 versions to D")


def test_no_stale_experience_is_said_plainly():
    assert "No experience is stale" in as_text(headings(two(("a", COLOCATED, 1.0), ("b", COLOCATED, 0.8)))["staleness"])


def test_ws_10_the_update_heading_compares_total_and_pause():
    text = as_text(update_heading(view_of(comparison()))).replace(NB, " ")
    # 21.6 s against 12.4 s; engines stand still for 1.7 s against 9.0 s
    assert text == "disk_delta (E) takes 1.74 × as long as broadcast (D), but pauses engines for 1.7 s instead of 9.0 s"


def test_idle_time_within_the_spread_makes_no_claim():
    view = two(("one", COLOCATED, 1.0), ("other", COLOCATED, 0.99), noise=0.03)
    assert "does not tell the variants apart" in as_text(headings(view)["gpu"])


def test_sections_without_data_are_left_out():
    bare = [run(n, COLOCATED, weight_update=WeightUpdate()) for n in ("a", "b")]
    for r in bare:
        r.trajectory = TrajectoryTime()
    view = view_of(build_comparison(study="s", question="q", variants=[VariantRuns("", r.name, "", [r]) for r in bare]))
    assert set(headings(view)) == {"gpu", "staleness"}


def test_rp_13_variants_that_change_several_things_are_limits():
    texts = [as_text(what) + as_text(why) for what, why in limits(view_of(comparison()))]
    assert any(t.startswith("D and E change three things at once (placement.mode, ") for t in texts)
    assert any(t.startswith("Time, not learning.") for t in texts)
    assert any("of decode steps lie outside" in t for t in texts)


def test_rp_13_what_changes_is_counted_against_the_baseline():
    shared = {"placement.mode": "colocated", "weights.path": "cuda_ipc"}
    variants = [
        VariantRuns("", name, "", [run(name, COLOCATED, stretch=k)], changes)
        for name, k, changes in (
            ("base", 1.0, shared),
            ("plain", 0.8, {}),
            ("same", 0.7, {**shared, "weights.kv": "keep"}),
        )
    ]
    texts = [
        as_text(w) + as_text(y)
        for w, y in limits(view_of(build_comparison(study="s", question="q", variants=variants)))
    ]
    assert any(t.startswith("B changes two things at once (placement.mode and weights.path)") for t in texts)
    assert not any(t.startswith(("A change", "C change")) for t in texts)


def test_limits_that_do_not_hold_are_not_printed():
    clean = [run("clean", LOOSE, marks={}, backend="real", capped_share=0.0)]
    texts = [
        as_text(what)
        for what, _ in limits(
            view_of(build_comparison(study="s", question="q", variants=[VariantRuns("", "c", "", clean)]))
        )
    ]
    assert not any("Dropping" in t or "outside" in t or "Time, not" in t or "No failures" in t for t in texts)


def test_rp_05_rests_on_names_every_input_family():
    text = as_text(rests_on(view_of(comparison())))
    assert text.startswith("Results simulated, D cheapest in 5 of 5 seeds")
    for words in (
        "engine step times measured",
        "reply lengths calibrated",
        "trainer and links analytic",
        "tools and price assumed",
    ):
        assert words in text


def test_a_single_run_is_described_without_comparison():
    c = build_comparison(study="s", question="q", variants=[variant(3, 1)])
    view = view_of(c)
    assert said(view).startswith("One step takes ")
    assert "instead of" not in said(view) and "break-even" not in as_text(price_of_it(view))
