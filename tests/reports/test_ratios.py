"""Histograms of probability ratios in the report: figures, table, plot, files, and what a simulation says instead."""

from __future__ import annotations

import json
import math
import re

import msgspec
import pytest

from reports import VariantRuns, comparison_figures, html, markdown
from reports.headings import headings
from reports.learning import learning_table
from reports.ratios import counts, far_share, range_text, ratio_table, ratio_text, same_share, shares, shown
from reports.sentences import Number
from reports.view import view_of
from testbed.metrics.files import read_summary, write_metrics
from testbed.metrics.ratios import BINS, FARTHEST
from testbed.metrics.summary import CAUSES, RunSummary
from tests.reports.invented import comparison
from tests.reports.test_html import Tree
from tests.reports.test_learning import said, updated, variants

NB = "\u00a0"

# Of 10,000 tokens: bin 0 is 1 to 0.01 %, bin 8 ends at exp(0.001), bin 16 at exp(0.01); 27 holds 1.2, -31 holds 0.5.
BF16 = {-31: 10, 0: 9_000, 8: 980, 27: 10}
FP8 = {-16: 4_000, 0: 1_000, 16: 4_900, 27: 100}


def counted(name, seed, engine=None, loss=None, clip=(0.8, 1.2), formats=("bf16", "bf16"), batches=2):
    """A real run whose batches share these tokens out evenly."""
    r = updated(name, seed, {"engine_kl": [1e-5] * batches, "clip_share": [0.01] * batches})
    for step in r.steps:
        for key, bins in (("engine_ratio", engine), ("ratio", loss)):
            if bins is not None:
                step.ratios[key] = {k: n // batches for k, n in bins.items()}
    return msgspec.structs.replace(r, clip=clip, engine_precision=formats[0], training_precision=formats[1])


@pytest.fixture(scope="module")
def two():
    return variants(
        [counted("bf16", s, BF16, {0: 10_000}) for s in (1, 2)],
        [counted("fp8", s, FP8, {0: 9_000, 27: 1_000}, formats=("fp8", "bf16")) for s in (1, 2)],
    )


def section(c):
    found = [s for s in Tree(html.render(c)).root.find("section") if s.attrs.get("id") == "ratios"]
    return found[0] if found else None


def test_rp_11_tokens_of_all_batches_and_seeds_are_one_histogram(two):
    assert shown(two) == ["engine_ratio", "ratio"]
    assert counts(two.variants[0], "engine_ratio") == {k: 2 * n for k, n in BF16.items()}
    assert same_share(BF16) == 0.9 and far_share(BF16) == pytest.approx(0.002)


def test_rp_11_the_range_of_99_percent_and_what_is_beyond_a_tenth():
    # half a percent may be left out on either side: 10 of 10,000 are, so the range is bins 0 to 8
    assert range_text(BF16) == f"{ratio_text(math.exp(-1e-4))} to {ratio_text(math.exp(1e-3))}" == "0.9999 to 1.001"
    assert range_text(FP8) == f"{ratio_text(math.exp(-1e-2))} to {ratio_text(math.exp(10 ** (27 / 8 - 4)))}"
    assert range_text({-FARTHEST: 1, FARTHEST: 1}) == "0 to ∞"
    assert range_text({0: 999, 27: 1}) == "0.9999 to 1.0001"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.exp(0.1), "1.11"),
        (math.exp(-0.1), "0.90"),
        (0.5, "0.5"),
        (math.e, "2.72"),
        (1.0001, "1.0001"),
        (0.97, "0.97"),
        (277.3, "277"),
        (0.0, "0"),
        (math.inf, "∞"),
    ],
)
def test_a_ratio_has_the_digits_that_its_distance_from_1_needs(value, text):
    assert ratio_text(value) == text


def test_rp_11_the_heading_names_what_each_precision_does(two):
    heading = headings(view_of(two))["ratios"]
    assert said(heading) == (
        "For 99 % of tokens the trainer’s probability over the engine’s lies between 0.9999 and 1.001 (A), "
        "0.99 and 1.27 (B)"
    )
    assert {p.kind for p in heading if isinstance(p, Number)} == {"measured"}


def test_rp_11_gaps_clipped_share_and_formats_stand_in_one_table(two):
    table = learning_table(view_of(two))
    head = [label for label, _, _ in table["head"]]
    assert head[0] == "Formats" and "Engine difference, k3" in head and "Clipped" in head
    assert [r["cells"][0][0] for r in table["rows"]] == ["bf16, bf16", "fp8, bf16"]
    ratios = ratio_table(view_of(two))
    assert [label for label, _, _ in ratios["head"]] == [
        *("Engine ratio", "equal", "outside"),
        *("Loss ratio", "equal", "outside", "Clip"),
    ]
    cells = [text.replace(NB, " ") for text, _ in ratios["rows"][0]["cells"]]
    assert cells[:3] == ["0.9999 to 1.001", "90.00 %", "0.20 %"] and cells[-1] == "0.8 to 1.2"


def test_rp_11_the_plot_has_a_bar_a_bin_whose_height_is_the_logarithm_of_its_share(two):
    drawing = section(two).find("svg", "fig")[0]
    bars = [r for r in drawing.find("rect") if r.find("title")]
    assert len(bars) == len(BF16) + len(FP8) + 1 + 2
    height = {r.find("title")[0].text().replace(NB, " ").rsplit(": ", 1)[1]: float(r.attrs["height"]) for r in bars}
    # 90 %, 9.8 % and 0.1 %: equal factors are equal differences of height
    per_decade = (height["90.00 %"] - height["0.10 %"]) / math.log10(900)
    assert height["90.00 %"] - height["9.80 %"] == pytest.approx(per_decade * math.log10(90 / 9.8), rel=0.02)
    _, _, width, _ = map(float, drawing.attrs["viewbox"].split())
    assert all(0 <= float(r.attrs["x"]) <= width for r in bars)
    dashed = drawing.find("line", "ref") + drawing.find("path", "ref")
    assert len(dashed) == 4, "two bounds in each histogram of the loss ratio"


def test_rp_05_terms_are_defined_and_numbers_marked(two):
    page = html.render(two)
    ids = {n.attrs["id"] for n in Tree(page).root.walk() if "id" in n.attrs}
    assert {"g-l-engine-ratio", "g-l-ratio", "g-l-formats"} <= ids
    (table,) = section(two).find("table", "plain")
    assert all(td.find("span", "n") or "m" in td.classes for td in table.find("td"))
    text = markdown.render(two).replace(NB, " ")
    assert "## Ratios of single tokens" in text and "**Loss ratio**" in text
    assert "| **B** fp8 | 0.99 to 1.27 ● |" in text


def test_rp_11_figures_for_programs_have_every_bin_with_its_edges(two):
    found = comparison_figures(two)["variants"][0]
    assert found["formats"] == "bf16, bf16"
    engine = found["ratios"]["engine_ratio"]
    assert sum(b["share"] for b in engine) == pytest.approx(1)
    assert engine[0]["low"] < 0.5 < engine[0]["high"] and engine[-1]["low"] < 1.2 < engine[-1]["high"]
    assert json.loads(json.dumps(shares(VariantRuns("", "a", "", [counted("a", 1, {FARTHEST: 2})]))))[
        "engine_ratio"
    ] == [{"low": pytest.approx(math.exp(10 ** (39 / 8 - 4))), "high": None, "share": 1.0}]


def test_rp_11_counts_by_step_survive_the_files(tmp_path):
    import pyarrow.parquet

    r = counted("a", 1, BF16, {0: 10_000})
    r.steps[1].ratios.pop("engine_ratio")
    for step in r.steps:
        step.gpu_seconds = dict.fromkeys(CAUSES, 0.0)
    beside = write_metrics(tmp_path / "metrics.parquet", r)
    back = read_summary(beside)
    assert [s.ratios for s in back.steps] == [s.ratios for s in r.steps] and back.clip == (0.8, 1.2)
    table = pyarrow.parquet.read_table(tmp_path / "metrics.parquet").to_pydict()
    first, second = table["ratios.engine_ratio"]
    assert len(first) == BINS and second is None
    assert (first[FARTHEST - 31], first[FARTHEST], first[FARTHEST + 27], sum(first)) == (5, 4_500, 5, 5_000)
    assert "ratios" not in table


def test_a_summary_from_before_ratios_were_kept_can_be_reported():
    tree = msgspec.to_builtins(counted("old", 1, BF16))
    for name in ("clip", "engine_precision", "training_precision"):
        del tree[name]
    for step in tree["steps"]:
        del step["ratios"]
    old = msgspec.json.decode(msgspec.json.encode(tree), type=RunSummary)
    assert section(variants([old])) is None and "Formats" not in html.render(variants([old]))


def test_variants_without_ratios_have_no_cells(two):
    c = variants([counted("has", 1, BF16)], [counted("has none", 1, clip=None)])
    (_, row) = ratio_table(view_of(c))["rows"]
    assert row["cells"] == [("·", "")] * 4


@pytest.mark.backend("SIM")
@pytest.mark.parametrize("n", [1, 3])
def test_rp_11_a_simulation_says_that_it_knows_nothing_of_mismatch(n):
    c = comparison(seeds=1, variants=n)
    assert shown(c) == [] and section(c) is None and "ratios" not in headings(view_of(c))
    for text in (html.render(c), markdown.render(c)):
        assert "Nothing on mismatch." in text and "unknown, not 0" in text
        assert not re.search("Engine ratio|Loss ratio|Formats", text)
    assert all(v["ratios"] == {} for v in comparison_figures(c)["variants"])
