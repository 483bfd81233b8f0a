"""Held-out rewards in the report: there when every run was asked before and after, with ends and gains of each seed."""

import msgspec
import pytest

from reports import VariantRuns, build_comparison, html, markdown
from reports.headings import headings
from reports.held_out import held_out, held_out_table, held_out_words
from reports.sentences import as_text
from reports.view import view_of
from testbed.metrics.scores import Mean, Score
from tests.reports.invented import ASYNC, COLOCATED, learning, run

ENDS = {"one": ((0.40, 0.90), (0.44, 0.86)), "two": ((0.40, 0.50), (0.44, 0.40))}
"""Variant -> (before, after) of each seed."""


def scored(name, seed, lanes, ends):
    r = learning(run(name, lanes, seed=seed), [0.5] * 10)
    return msgspec.structs.replace(r, held_out=[Score("", Mean(x, x - 0.05, x + 0.05, 256)) for x in ends])


@pytest.fixture(scope="module")
def compared():
    rows = [
        VariantRuns("", name, "", [scored(name, seed, lanes, pair) for seed, pair in enumerate(ENDS[name], 1)])
        for name, lanes in (("one", COLOCATED), ("two", ASYNC))
    ]
    return build_comparison(study="s", question="q", seconds=1.0, variants=rows)


def test_each_variant_has_both_ends_the_gain_and_the_gain_of_each_seed(compared):
    view = view_of(compared)
    table = held_out_table(view)
    assert table["head"] == ["before", "after", "gain", "seed 1", "seed 2"]
    cells = {r["name"]: [c.split("\u00a0")[0].split(" ")[0] for c in r["cells"]] for r in table["rows"]}
    assert [float(x) for x in cells["one"]] == pytest.approx([0.42, 0.88, 0.46, 0.50, 0.42])
    assert cells["two"][-1] == "\u22120.04"


def test_the_words_name_the_tasks_and_the_smallest_gain(compared):
    words = as_text(held_out_words(view_of(compared)))
    assert "256 tasks" in words and "\u22120.04" in words and words.endswith(", in B.")
    heading = as_text(headings(view_of(compared))["held_out"])
    assert heading == "On held-out tasks the reward goes from 0.42 to 0.88 (A) and from 0.42 to 0.45 (B)"


def test_the_page_and_the_markdown_have_the_section(compared):
    assert 'id="held_out"' in html.render(compared) and "## Held-out tasks" in markdown.render(compared)


@pytest.mark.parametrize("asked", [0, 1])
def test_runs_that_were_not_asked_twice_have_no_section(compared, asked):
    runs = [msgspec.structs.replace(r, held_out=r.held_out[:asked]) for r in compared.variants[0].runs]
    c = build_comparison(study="s", question="q", seconds=1.0, variants=[VariantRuns("", "one", "", runs)])
    assert not held_out(c) and "held_out" not in headings(view_of(c)) and 'id="held_out"' not in html.render(c)
