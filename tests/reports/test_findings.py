"""What the report claims, and what it must not claim."""

import pytest

from reports import VariantRuns, build_comparison
from reports.answer import answer, price_of_it, rests_on
from reports.compared import marked
from reports.headings import headings, update_heading
from reports.limits import limits
from reports.sentences import Number, as_markdown, as_text
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


def several(*variants, baseline=0, **options):
    """One seed each; `variants` are (name, lanes, options), where `trained` sets the tokens trained in all steps."""
    made = []
    for name, lanes, given in variants:
        given = dict(given)
        trained = given.pop("trained", None)
        one = run(name, lanes, **given)
        if trained is not None:
            one.waste.trained_tokens = trained
        made.append(VariantRuns("", name, "", [one]))
    return view_of(build_comparison(study="s", question="q", variants=made, baseline=baseline, **options))


def price(view):
    return as_text(price_of_it(view)).replace(NB, " ")


@pytest.mark.parametrize(("trained", "said_so"), [(60_000, True), (100_000, False)])
def test_as_10_an_answer_whose_steps_train_less_says_so_in_the_same_breath(trained, said_so):
    view = several(("all", COLOCATED, {"trained": 100_000}), ("other", COLOCATED, {"stretch": 0.5, "trained": trained}))
    assert said(view).endswith("; but each of its steps trains 40 % fewer tokens.") is said_so
    assert ("fewer tokens" in said(view)) is said_so


def test_as_10_whoever_trains_more_tokens_a_second_than_the_answer_is_named():
    rate = "trained_tokens_per_s_per_gpu"
    view = several(
        ("base", COLOCATED, {rate: 300.0}),
        ("drops nothing", COLOCATED, {"stretch": 0.7, rate: 450.0}),
        ("drops most", COLOCATED, {"stretch": 0.5, rate: 350.0, "waste": 0.6}),
    )
    assert said(view).startswith("Run drops most (C)")
    assert price(view).startswith("It drops 60 % of what it generates")
    assert "B trains more tokens: 450 against 350 per s per GPU." in price(view)


def test_as_10_of_variants_that_tie_each_one_is_charged_with_its_waste():
    view = several(
        ("block", COLOCATED, {"trained": 100_000}),
        ("drop", COLOCATED, {"stretch": 0.98, "waste": 0.26, "trained": 100_000}),
        ("drop more", COLOCATED, {"stretch": 1.02, "waste": 0.57, "trained": 50_000}),
        ("slow", COLOCATED, {"stretch": 1.5}),
    )
    assert said(view).startswith("Nothing beats block (A) by more than 5 %: it ties with B and C")
    assert price(view).startswith(
        "Of what they generate, A drops nothing, B drops 26 % and C drops 57 %; C’s steps train 50 % fewer tokens. "
    )


def test_what_is_aborted_and_generated_again_is_wasted_not_dropped():
    view = several(("base", COLOCATED, {}), ("hybrid", COLOCATED, {"stretch": 0.5, "waste": 0.25}))
    view.comparison.variants[1].runs[0].waste.dropped_trajectories = {}
    assert price(view_of(view.comparison)).startswith("It wastes 25 % of what it generates")


def test_where_the_baseline_ties_the_page_speaks_of_it():
    view = several(("base", COLOCATED, {}), ("other", COLOCATED, {"stretch": 0.98}))
    assert view.winner.name == "base"


def test_variants_that_do_different_work_are_not_ranked():
    view = several(
        ("short", COLOCATED, {"workload": "aa", "stretch": 0.5}),
        ("long", COLOCATED, {"workload": "bb"}),
        allow_unequal=("workload",),
    )
    # the causes of the colocated lane add up to 328 s
    assert said(view) == (
        "The variants do different work, so none is recommended: a step takes between 164 s (A) and 328 s (B)."
    )
    assert "break-even" not in price(view)
    assert all(not letters for letters in marked(view).values())


def test_cases_to_look_at_are_not_ranked():
    view = several(("one", COLOCATED, {"stretch": 0.5}), ("other", COLOCATED, {}), alternatives=False)
    assert said(view) == (
        "The variants are cases to look at, so none is recommended: a step takes between 164 s (A) and 328 s (B)."
    )
    assert all(not letters for letters in marked(view).values())


def test_ws_04_a_path_is_not_blamed_for_the_rule_it_was_used_under():
    """Draining requests under `finish` takes 60 s on any path: broadcast is judged by the variant without it."""
    view = several(
        ("delta", COLOCATED, {"path": "disk_delta", "update": (6.9, 0.0, 1.7, 0.0, 0.0, 1.7)}),
        ("broadcast, finish", COLOCATED, {"update": (0.2, 60.0, 3.4, 0.0, 0.0, 3.5), "stretch": 2}),
        ("broadcast, retract", COLOCATED, {"update": (0.2, 0.0, 4.1, 0.0, 0.0, 4.1), "stretch": 2}),
    )
    text = as_text(update_heading(view)).replace(NB, " ")
    # 8.6 s against 4.3 s
    assert text == "disk_delta (A) takes 2.00 × as long as broadcast (C), but pauses engines for 1.7 s instead of 4.1 s"


def test_idle_time_that_differs_is_not_called_indistinct():
    idle = dict(COLOCATED[0][3])
    busy = {**idle, "idle_longest": 7.0, "train": idle["train"] + 30.0}
    view = several(("base", COLOCATED, {}), ("other", [("shared", "shared", 64, busy)], {}))
    # 37 s of 328 s against 7 s of 328 s, and no difference in step time
    text = as_text(headings(view)["gpu"]).replace(NB, " ")
    assert text == "A leaves 11 % of its GPU time idle, B 2.1 %"


def test_rp_05_lengths_of_a_stated_kind_read_as_a_sentence():
    texts = [as_markdown(what) + " " + as_markdown(why) for what, why in limits(view_of(comparison()))]
    assert any(t.startswith("Lengths are ◐ calibrated. ") for t in texts)
