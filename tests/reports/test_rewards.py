"""Real runs learn: what the report says of their rewards, and that it says nothing of simulated ones."""

import csv
import io
import itertools
import re
import statistics

import msgspec
import pytest

from reports import VariantRuns, build_comparison, comparison_figures, html, markdown, tables
from reports.answer import price_of_it
from reports.comparison import all_figures
from reports.figure_files import write_figures
from reports.headings import headings
from reports.limits import limits
from reports.metrics import METRICS, REWARD, reward_ends
from reports.pages import stylesheet
from reports.reward import curve, reward_against_base, reward_margin, reward_table
from reports.reward_plot import spread_out
from reports.sentences import Number, as_text
from reports.view import view_of
from tests.reports.invented import COLOCATED, comparison, learning, learnt, run
from tests.reports.test_html import Tree

NB = "\u00a0"
FAST = [
    [0.40, 0.50, 0.50, 0.60, 0.60, 0.70, 0.75, 0.80, 0.84, 0.88],
    [0.50, 0.50, 0.6, 0.6, 0.7, 0.7, 0.8, 0.8, 0.86, 0.86],
]
"""Two seeds of ten batches: a fifth is two batches."""
SLOW = [[0.44, 0.46, 0.5, 0.5, 0.5, 0.5, 0.6, 0.6, 0.60, 0.62], [0.42, 0.44, 0.5, 0.5, 0.5, 0.5, 0.6, 0.6, 0.62, 0.64]]


def ends(rewards):
    """First and last fifth of the batches, worked out anew: by position, without slices."""
    n = len(rewards)
    fifth = n // 5 if n >= 5 else 1
    first = sum(r for i, r in enumerate(rewards) if i < fifth) / fifth
    last = sum(r for i, r in enumerate(rewards) if i >= n - fifth) / fifth
    return first, last


def heading(c):
    return as_text(headings(view_of(c))["reward"])


def said(sentence):
    return as_text(sentence).replace(NB, " ")


def section(c):
    found = [s for s in Tree(html.render(c)).root.find("section") if s.attrs.get("id") == "reward"]
    assert len(found) <= 1
    return found[0] if found else None


@pytest.fixture(scope="module")
def two():
    return learnt({"fast": FAST, "slow": SLOW})


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.3], (0.3, 0.3)),
        ([0.2, 0.8], (0.2, 0.8)),
        ([0.1, 0.5, 0.5, 0.9], (0.1, 0.9)),
        ([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9], (0.1, 0.9)),  # nine batches: a fifth is one
        ([0.1, 0.3, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.7, 0.9], (0.2, 0.8)),
    ],
)
def test_the_ends_are_fifths_of_all_batches_and_one_at_least(rewards, expected):
    assert reward_ends(learning(run("x", COLOCATED), rewards)) == pytest.approx(expected)
    assert ends(rewards) == pytest.approx(expected)


def test_the_heading_has_the_means_of_the_fifths_over_seeds(two):
    means = [tuple(statistics.mean(ends(rewards)[i] for rewards in seeds) for i in (0, 1)) for seeds in (FAST, SLOW)]
    (a0, a1), (b0, b1) = means
    assert heading(two) == f"Reward rises from {a0:.2f} to {a1:.2f} in A and from {b0:.2f} to {b1:.2f} in B"
    # by hand: A (0.45 + 0.50) / 2 and (0.86 + 0.86) / 2, B (0.45 + 0.43) / 2 and (0.61 + 0.63) / 2
    assert [f"{x:.3f}" for x in (*means[0], *means[1])] == ["0.475", "0.860", "0.440", "0.620"]


def test_rp_05_figures_of_rewards_are_measured(two):
    numbers = [p for p in headings(view_of(two))["reward"] if isinstance(p, Number)]
    assert len(numbers) == 4 and {p.kind for p in numbers} == {"measured"}
    for f in all_figures(two):
        assert {f.kinds[name] for name in REWARD} == {"measured"}


def test_one_seed_and_one_run():
    c = learnt({"only": FAST[:1]})
    assert heading(c) == "Reward rises from 0.45 to 0.86"
    assert said(reward_margin(view_of(c))) == (
        "The rise, last fifth minus first: 0.41; with one seed it is not known how much of it is chance."
    )
    assert said(reward_against_base(view_of(c))) == ""
    found = section(c)
    assert found is not None and not found.find("polygon") and len(found.find("polyline")) == 2


def test_the_margin_over_seeds_is_the_mean_the_spread_and_the_smallest_rise(two):
    rises = [[ends(r)[1] - ends(r)[0] for r in seeds] for seeds in (FAST, SLOW)]
    words = [
        f"{letter} {statistics.mean(x):.2f} ± {statistics.stdev(x):.2f} (at least {min(x):.2f})"
        for letter, x in zip("AB", rises, strict=True)
    ]
    text = said(reward_margin(view_of(two)))
    assert text == f"The rise, last fifth minus first in each of 2 seeds: {words[0]}, {words[1]}."
    table = reward_table(view_of(two))
    assert table["head"] == ["first fifth", "last fifth", "rise", "smallest rise", "seed 1", "seed 2"]
    for row, x in zip(table["rows"], rises, strict=True):
        assert row["cells"][3:] == [f"{min(x):.2f}", f"{x[0]:.2f}", f"{x[1]:.2f}"]


def test_the_ends_are_compared_with_the_baseline_only_beyond_the_spread(two):
    # 0.86 against 0.62 with a spread of 0.014; 0.86 and 0.86 with wide spread
    assert said(reward_against_base(view_of(two))) == "In the last fifth B is 0.24 below A."
    tie = learnt({"a": [[0.4, 0.8], [0.4, 0.9]], "b": [[0.4, 0.78], [0.4, 0.9]]})
    assert (
        said(reward_against_base(view_of(tie))) == "In the last fifth B does not differ from A by more than the spread."
    )
    alone = learnt({"a": [[0.4, 0.80]], "b": [[0.4, 0.78]]})
    assert said(reward_against_base(view_of(alone))) == "In the last fifth B does not differ from A by more than 5 %."


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        ({"a": [[0.8, 0.2]]}, "Reward falls from 0.80 to 0.20"),
        ({"a": [[0.50, 0.51]]}, "Reward does not clearly change: from 0.50 to 0.51"),
        ({"a": [[0.001, 0.002]]}, "Reward does not clearly change: from 0.00 to 0.00"),
        (
            {"a": [[0.4, 0.8]], "b": [[0.8, 0.4]], "c": [[0.5, 0.5]]},
            "Reward rises from 0.40 to 0.80 in A, falls from 0.80 to 0.40 in B, and does not clearly change in "
            "C (0.50 to 0.50)",
        ),
        # over seeds the two fifths overlap: (0.4, 0.7) and (0.7, 0.5)
        ({"a": [[0.4, 0.7], [0.7, 0.5]]}, "Reward does not clearly change: from 0.55 to 0.60"),
    ],
)
def test_a_rise_is_claimed_only_where_there_is_one(rewards, words):
    assert heading(learnt(rewards)) == words


def test_of_many_variants_the_heading_counts():
    rewards = {f"v{i}": [[0.4, 0.5 + 0.1 * i]] for i in range(4)}
    assert heading(learnt(rewards)) == "Reward rises in every variant, and ends between 0.50 (A) and 0.80 (D)"
    rewards["down"] = [[0.4, 0.1]]
    assert heading(learnt(rewards)) == (
        "Reward rises in four of five variants, falls in one, and ends between 0.10 (E) and 0.80 (D)"
    )
    view = view_of(learnt(rewards))
    assert said(reward_margin(view)).startswith(
        "The rise, last fifth minus first, is largest in D: 0.40, and smallest in E: \u22120.30; "
    )
    assert said(reward_against_base(view)) == (
        "In the last fifth B, C and D are between 0.10 and 0.30 above A; E is 0.40 below A."
    )


def test_rp_05_the_section_has_both_plots_its_kind_and_marked_numbers(two):
    found = section(two)
    figures = found.find("svg", "fig")
    assert ["nw" in f.classes for f in figures] == [False, True]
    assert [f.attrs["viewbox"].split()[2] for f in figures] == ["1216", "358"]
    (lead,) = found.find("p", "lead")
    (kind,) = lead.find("span", "ck")
    assert kind.text() == "measured" and "2 seeds" in lead.text()
    for n in found.find("span", "n"):
        (mark,) = n.find("svg", "k")
        assert mark.attrs["aria-label"] == "measured"
    (after,) = found.find("p", "after")
    assert not re.search(r"\d", re.sub(r"each of 2 seeds", "", after.text(("title", "span"))))
    for td in found.find("td"):
        assert len(td.find("span", "n")) == 1


def test_the_line_is_the_mean_over_seeds_and_the_band_its_ends(two):
    (x, _) = (curve(v) for v in two.variants)
    assert x.batches == list(range(10))
    assert x.mean == pytest.approx([(a + b) / 2 for a, b in zip(*FAST, strict=True)])
    assert x.low == [min(p) for p in zip(*FAST, strict=True)] and x.high == [max(p) for p in zip(*FAST, strict=True)]
    drawing = section(two).find("svg", "fig")[0]
    lines, bands = drawing.find("polyline", "curve"), drawing.find("polygon", "band")
    assert len(lines) == len(bands) == 2 and "s-vA" in lines[0].classes and "c-vB" in bands[1].classes
    points = [tuple(map(float, p.split(","))) for p in lines[0].attrs["points"].split()]
    assert len(points) == 10
    # y falls by the same px for the same reward, x grows by the same px for every step
    px = (points[0][1] - points[9][1]) / (x.mean[9] - x.mean[0])
    for (_, y), mean in zip(points, x.mean, strict=True):
        assert y == pytest.approx(points[0][1] - px * (mean - x.mean[0]), abs=0.05)
    steps = [b[0] - a[0] for a, b in itertools.pairwise(points)]
    assert max(steps) - min(steps) < 0.05
    outline = [tuple(map(float, p.split(","))) for p in bands[0].attrs["points"].split()]
    for i, (low, high) in enumerate(zip(x.low, x.high, strict=True)):
        ys = [y for at, y in outline if abs(at - points[i][0]) < 0.01]
        assert max(ys) - min(ys) == pytest.approx(px * (high - low), abs=0.05)


def test_seeds_of_unequal_length_share_the_batches_that_all_have():
    c = learnt({"a": [[0.4, 0.5, 0.6], [0.4, 0.7]]})
    assert curve(c.variants[0]).batches == [0, 1]
    html.render(c)


@pytest.mark.parametrize(
    "rewards", [[[0.5]], [[1.0, 1.0]], [[-2.0, -1.0]], [[-1.0, 1.0]], [[30.0, 90.0], [20.0, 80.0]]]
)
def test_any_rewards_can_be_drawn(rewards):
    drawing = section(learnt({"a": rewards})).find("svg", "fig")[0]
    _, _, width, height = map(float, drawing.attrs["viewbox"].split())
    for node in drawing.find("polyline") + drawing.find("polygon"):
        for p in node.attrs["points"].split():
            x, y = map(float, p.split(","))
            assert 0 <= x <= width and 0 <= y <= height


def test_drawn_roles_have_a_style_in_many_variants():
    found = section(learnt({f"v{i}": [[0.3, 0.4 + 0.01 * i], [0.3, 0.41]] for i in range(12)}))
    css = stylesheet()
    used = {c for n in found.walk() if n.tag in ("polyline", "polygon") for c in n.classes}
    assert {"s-vA", "s-vL", "c-vL", "curve", "band"} <= used
    assert all(f".{name}{{" in css for name in used)


def test_labels_are_moved_apart_and_stay_inside():
    assert spread_out([50.0, 50.0, 10.0], 17, 0, 100) == [50.0, 67.0, 10.0]
    out = spread_out([95.0, 99.0, 97.0], 17, 0, 100)
    assert sorted(out) == [66.0, 83.0, 100.0] and out[0] < out[2] < out[1]


def test_tables_of_real_runs_have_the_rewards_with_their_spread(two):
    rows = list(csv.DictReader(io.StringIO(tables.table_csv(all_figures(two)))))
    assert len(rows) == 2 * (len(METRICS) + len(REWARD))
    for letter, seeds in (("A", FAST), ("B", SLOW)):
        values = {
            "reward_first": [ends(r)[0] for r in seeds],
            "reward_last": [ends(r)[1] for r in seeds],
            "reward_rise": [ends(r)[1] - ends(r)[0] for r in seeds],
        }
        for name, x in values.items():
            (row,) = [r for r in rows if r["variant"] == letter and r["metric"] == name]
            assert float(row["mean"]) == pytest.approx(statistics.mean(x))
            assert float(row["sd"]) == pytest.approx(statistics.stdev(x)) and row["kind"] == "measured"
        figures = next(v for v in comparison_figures(two)["variants"] if v["letter"] == letter)["figures"]
        assert figures["reward_rise"]["values"] == pytest.approx(values["reward_rise"])
    rise = f"0.39{NB}±{NB}0.04"  # (0.41 + 0.36) / 2 = 0.385
    page, text = html.render(two), markdown.render(two)
    assert "Reward, last fifth" in page and "| Reward, rise (last fifth minus first) |" in text
    assert page.count(rise) >= 3 and text.count(rise) == 3  # margin, table, all figures
    assert "## Reward\n" in text and '<a href="#reward">Reward</a>' in page


@pytest.mark.parametrize("seeds", [1, 3])
def test_nothing_is_said_of_the_rewards_of_a_simulation(seeds):
    c = comparison(seeds=seeds, variants=2)
    for r in c.runs:
        r.steps = learning(r, [0.4, 0.9]).steps
    assert not c.rewarded and "reward" not in headings(view_of(c)) and section(c) is None
    page, text = html.render(c), markdown.render(c)
    assert 'href="#reward"' not in page and "g-reward" not in page and "Reward, " not in page + text
    assert "## Reward" not in text and "Rise" not in text
    assert not set(REWARD) & set(all_figures(c)[0].stats)
    assert "reward_first" not in tables.table_csv(all_figures(c))


@pytest.fixture(scope="module")
def mixed():
    """A simulated run and a real one of the same scenario, as in a validation."""
    real = learning(run("real", COLOCATED), [0.4, 0.9])
    variants = [VariantRuns("", "simulated", "", [run("simulated", COLOCATED)]), VariantRuns("", "real", "", [real])]
    return build_comparison(study="s", question="q", variants=variants, seconds=3.0, facts={"engine_step": "on CPU"})


def test_a_simulated_and_a_real_run_have_no_reward_section(mixed):
    assert not mixed.rewarded and section(mixed) is None and "## Reward" not in markdown.render(mixed)
    assert not set(REWARD) & set(comparison_figures(mixed)["variants"][1]["figures"])


def test_in_a_mixed_comparison_only_the_simulated_run_is_called_untrained(mixed):
    texts = [said(what) + " " + said(why) for what, why in limits(view_of(mixed))]
    assert "Time, not learning. In A the model was not trained. Nothing here says what is learnt in a step." in texts
    assert not any("stand-ins" in t for t in texts)


def test_summaries_from_before_rewards_were_kept_have_no_section():
    c = learnt({"old": [[0.0, 0.0, 0.0]]})
    assert section(c) is None
    assert said(price_of_it(view_of(c))).endswith("Reward is not part of this report.")
    html.render(
        build_comparison(
            study="s", question="q", variants=[VariantRuns("", "x", "", [run("x", COLOCATED, backend="real")])]
        )
    )


def test_a_variant_without_any_reward_is_a_limit():
    c = learnt({"a": [[0.4, 0.8]], "b": [[0.0, 0.0]]})
    texts = [said(what) + " " + said(why) for what, why in limits(view_of(c))]
    assert "The reward of B is 0 in every batch, or the run's summary was written before rewards were kept." in texts
    assert not any("reward of" in said(what) for what, _ in limits(view_of(learnt({"a": [[0.4, 0.8]]}))))


def test_the_words_of_a_real_run_are_not_those_of_a_simulation(two):
    root = Tree(html.render(two)).root
    words = root.find("main")[0].text().rpartition("Glossary")[0] + root.find("header")[0].text()
    assert "simulat" not in words.lower() and "CPU time" not in words and "of wall time" in words
    text = markdown.render(two).split("## Glossary")[0]
    assert "simulat" not in text.lower() and "○" not in text
    assert "Reward is not" not in said(price_of_it(view_of(two)))
    data = comparison_figures(two)
    assert data["wall_seconds"] == 41.0 and "cpu_seconds" not in data
    simulated = comparison(seeds=1, variants=2)
    assert "of CPU time" in html.render(simulated) and comparison_figures(simulated)["cpu_seconds"] == 41.0


@pytest.mark.parametrize(
    ("fact", "said_so"),
    [
        ("SGLang engines on CPU, wall clock", True),
        ("SGLang engines on NVIDIA H200, wall clock", False),
        (None, False),
    ],
)
def test_rp_13_stand_ins_on_a_cpu_are_a_limit(fact, said_so):
    c = learnt({"a": [[0.4, 0.8]]}, facts={} if fact is None else {"engine_step": fact})
    texts = [said(what) + " " + said(why) for what, why in limits(view_of(c))]
    assert any(t.startswith("The GPUs are stand-ins. ") and "share the machine's cores" in t for t in texts) is said_so


def test_a_simulation_of_a_cpu_machine_is_not_called_a_stand_in():
    c = comparison(seeds=1, facts={"engine_step": "coefficients of one CPU"})
    assert not any("stand-ins" in said(what) for what, _ in limits(view_of(c)))


def test_op_05_a_variant_without_rewards_stays_out_of_the_rewards_and_is_named(two, tmp_path):
    """Distillation alone asks for none: its zeros are no measurement, also where it is the baseline."""
    free = VariantRuns("", "distilled", "", [msgspec.structs.replace(learning(r, [0.0] * 10), rewarded=False)
                                             for r in two.variants[0].runs])  # fmt: skip
    c = build_comparison(study="s", question="q", seconds=1.0, variants=[free, *two.variants])
    text = markdown.render(c)
    table = text.split("## Reward\n")[1].split("## ")[0]
    assert "fast" in table and "slow" in table and "distilled" not in table
    row = next(line for line in text.splitlines() if line.startswith("| Reward, rise"))
    assert [cell.strip() == "·" for cell in row.split("|")[2:5]] == [True, False, False]
    assert any(as_text(head) == "A asks for no rewards," for head, _ in limits(view_of(c)))
    assert 'id="reward"' in html.render(c) and "reward_rise" not in tables.table_csv(all_figures(c)[:1])
    assert write_figures(c, tmp_path)


def test_op_05_runs_that_all_ask_for_no_rewards_have_no_section(two):
    runs = [msgspec.structs.replace(r, rewarded=False) for r in two.variants[0].runs]
    c = build_comparison(study="s", question="q", seconds=1.0, variants=[VariantRuns("", "distilled", "", runs)])
    assert "reward" not in headings(view_of(c)) and 'id="reward"' not in html.render(c)
