"""What updates did, in the report: which series it shows, their ends, and the figures as files."""

import csv
import io
import math
import re
import statistics

import msgspec
import pytest

from reports import VariantRuns, build_comparison, comparison_figures, html, markdown, tables, write_report
from reports.comparison import all_figures
from reports.headings import headings
from reports.learning import at_rest, costs_shown, learning_table, learning_words, shown
from reports.learning_plot import scale_of
from reports.numbers import scientific, size, tick
from reports.pages import stylesheet
from reports.reward import Curve
from reports.sentences import Number, as_text
from reports.series import SERIES
from reports.view import view_of
from testbed.commands.folders import drop_report
from testbed.metrics.files import read_summary, write_metrics
from testbed.metrics.summary import CAUSES, RunSummary
from tests.reports.invented import ASYNC, COLOCATED, comparison, learning, learnt, run
from tests.reports.test_html import Tree

NB = "\u00a0"


def updated(name, seed, series, lanes=COLOCATED, **changes):
    """A real run whose batches have these series: name -> a value per batch."""
    r = learning(run(name, lanes, seed=seed, **changes), [0.5] * len(next(iter(series.values()))))
    for i, step in enumerate(r.steps):
        step.learning.update({k: values[i] for k, values in series.items() if values[i] is not None})
    return r


def variants(*runs):
    return build_comparison(
        study="s", question="q", seconds=1.0, variants=[VariantRuns("", r[0].name, "", list(r)) for r in runs]
    )


def said(sentence):
    return as_text(sentence).replace(NB, " ")


def section(c):
    found = [s for s in Tree(html.render(c)).root.find("section") if s.attrs.get("id") == "learning"]
    assert len(found) <= 1
    return found[0] if found else None


PRECISION = {
    "fp32": ((2e-13, 3e-13), 3_200_000.0, 0.0),
    "bf16": ((1e-5, 2e-5), 1_600_000.0, 0.0),
    "fp8 engines": ((4e-4, 6.4e-4), 900_000.0, 0.25),
}


@pytest.fixture(scope="module")
def precisions():
    """Three formats over two seeds of ten batches: the agreement gets worse as the weights get smaller."""
    rows = []
    for name, (gaps, size_, requantize) in PRECISION.items():
        seeds = []
        for seed, gap in enumerate(gaps, 1):
            series = {
                "engine_kl": [gap * (1 + 0.1 * (i % 2)) for i in range(10)],
                "update_kl": [2e-3 + seed * 1e-4] * 10,
                "grad_norm": [1.0 + 0.1 * seed] * 10,
                "clip_share": [0.0] * 10,
            }
            r = updated(name, seed, series, update=(3.4, 0.0, 5.9, requantize, 0.7, 9.0))
            seeds.append(msgspec.structs.replace(r, engine_weight_bytes=size_))
        rows.append(seeds)
    return variants(*rows)


def test_qm_01_and_qm_03_engine_and_update_difference_are_two_columns(precisions):
    view = view_of(precisions)
    assert shown(precisions) == ["engine_kl", "update_kl", "grad_norm"]
    head = [label for label, _, _ in learning_table(view)["head"]]
    assert head[:2] == ["Engine difference, k3", "Update difference, k3"]
    for f, (gaps, *_) in zip(all_figures(precisions), PRECISION.values(), strict=True):
        # the last fifth of ten batches is the last two, one of them a tenth larger
        assert f.learning["engine_kl"].last.values == pytest.approx([1.05 * g for g in gaps])
        assert f.learning["update_kl"].last.values == pytest.approx([0.0021, 0.0022])


def test_qm_09_agreement_and_cost_stand_beside_each_other(precisions):
    view = view_of(precisions)
    assert costs_shown(view)
    table = learning_table(view)
    assert [label for label, _, _ in table["head"]][-2:] == ["Weights of an engine", "Requantise"]
    cells = {r["name"]: [text.replace(NB, " ") for text, _ in r["cells"]] for r in table["rows"]}
    assert cells["fp8 engines"] == ["(5.5 ± 1.8) × 10⁻⁴", "0.00215 ± 0.00007", "1.15 ± 0.07", "900 kB", "0.25 s"]
    assert cells["fp32"][-2:] == ["3.20 MB", "0 s"]
    assert table["rows"][0]["cells"][-2][1] == "analytic" and table["rows"][0]["cells"][0][1] == "measured"
    text = markdown.render(precisions).replace(NB, " ")
    row = "(5.5 ± 1.8) × 10⁻⁴ ● | 0.00215 ± 0.00007 ● | 1.15 ± 0.07 ● | 900 kB △ | 0.25 s ● |"
    assert f"| **C** fp8 engines | {row}" in text
    assert not costs_shown(view_of(variants([updated("a", 1, {"engine_kl": [1e-5]})])))


def test_the_heading_has_both_differences_with_their_marks(precisions):
    heading = headings(view_of(precisions))["learning"]
    assert said(heading) == (
        "Trainer and engine differ by 2.6 × 10⁻¹³ (A), 1.6 × 10⁻⁵ (B) and 5.5 × 10⁻⁴ (C) nats per token before an "
        "update, an update adds 0.0022 (A), 0.0022 (B) and 0.0022 (C)"
    )
    assert {p.kind for p in heading if isinstance(p, Number)} == {"measured"}


def test_what_is_at_rest_is_said_and_not_drawn(precisions):
    assert at_rest(precisions) == ["clip_share"]
    assert said(learning_words(view_of(precisions))) == "Clipped was at rest in every batch and has no curve. "
    c = variants([updated("a", 1, {"clip_share": [0, 0.0], "masked_share": [0.0, 0], "effective_sample_size": [1, 1]})])
    assert shown(c) == [] and section(c) is None and "learning" not in headings(view_of(c))
    partly = variants([updated("a", 1, {"clip_share": [0.0, 0.1], "effective_sample_size": [1, 0.99996]})])
    assert shown(partly) == ["clip_share"]


def test_no_difference_at_all_is_a_finding():
    c = variants([updated("a", 1, {"engine_kl": [0.0, 0.0]})])
    assert shown(c) == ["engine_kl"]
    assert said(headings(view_of(c))["learning"]) == "Trainer and engine differ by 0 nats per token before an update"


def test_stale_experience_is_named_where_it_enters_the_engine_difference():
    fresh = [updated("fresh", s, {"engine_kl": [1e-5] * 5}) for s in (1, 2)]
    stale = [
        updated("stale", s, {"engine_kl": [1e-3] * 5}, ASYNC, completion={0: 640}, dequeue={1: 115, 2: 525}, bound=2)
        for s in (1, 2)
    ]
    text = said(learning_words(view_of(variants(fresh, stale))))
    assert text == (
        "The experience of B is older than the trainer: its engine difference also holds the updates since it was "
        "generated. "
    )
    assert said(learning_words(view_of(variants(fresh)))) == ""


def test_the_distance_to_a_teacher_goes_from_its_first_fifth_to_its_last():
    middle = [0.6, 0.4, 0.3, 0.2, 0.15, 0.1]
    falls = [[1.0, 0.8, *middle, 0.08, 0.04], [1.2, 0.8, *middle, 0.06, 0.06]]
    c = variants([updated("opd", s, {"teacher_kl": x, "grad_norm": x}) for s, x in enumerate(falls, 1)])
    # (0.9 + 1.0) / 2 and (0.06 + 0.06) / 2
    assert said(headings(view_of(c))["learning"]) == "KL to the teacher goes from 0.95 to 0.060"


def test_variants_that_lack_a_series_have_no_cell_and_no_line():
    c = variants(
        [updated("opd", 1, {"teacher_kl": [0.9, 0.5], "grad_norm": [1.0, 2.0]})],
        [updated("grpo", 1, {"grad_norm": [1.0, 3.0]})],
    )
    rows = learning_table(view_of(c))["rows"]
    assert rows[1]["cells"][0] == ("·", "")
    drawing = section(c).find("svg", "fig")[0]
    assert len(drawing.find("polyline", "curve")) == 3
    assert said(headings(view_of(c))["learning"]) == "KL to the teacher goes from 0.90 to 0.50 (A)"


def test_of_many_variants_the_heading_names_the_smallest_and_the_largest():
    c = variants(*([updated(f"v{i}", 1, {"mismatch_kl": [1e-3 * (i + 1)] * 2})] for i in range(5)))
    assert said(headings(view_of(c))["learning"]) == (
        "The policies that train and that generated differ by between 0.0010 (A) and 0.0050 (E) nats per token"
    )


def test_the_lines_are_means_over_seeds_and_bands_their_ends(precisions):
    drawing = section(precisions).find("svg", "fig")[0]
    curves, bands = drawing.find("polyline", "curve"), drawing.find("polygon", "band")
    assert len(curves) == len(bands) == 9
    words = [t.text() for t in drawing.find("text")]
    assert {"Engine difference, k3", "Update difference, k3", "Gradient norm"} <= set(words)
    _, _, width, height = map(float, drawing.attrs["viewbox"].split())
    points = [[tuple(map(float, p.split(","))) for p in n.attrs["points"].split()] for n in curves]
    assert all(0 <= x <= width and 0 <= y <= height for line in points for x, y in line)
    # a logarithmic axis: equal factors are equal distances
    a, b, c = (statistics.mean(y for _, y in line) for line in points[:3])
    logs = [math.log10(statistics.mean(gaps)) for gaps, *_ in PRECISION.values()]
    assert (a - b) / (b - c) == pytest.approx((logs[1] - logs[0]) / (logs[2] - logs[1]), rel=0.01)


@pytest.mark.parametrize(
    ("name", "low", "high", "logarithmic", "ends"),
    [
        ("engine_kl", 1e-9, 1e-4, True, (-9, -4)),
        ("engine_kl", 0.0, 1e-4, False, (0, 1e-4)),
        ("engine_kl", 2e-5, 8e-5, False, (0, 8e-5)),
        ("grad_norm", 0.01, 10.0, False, (0, 10)),
        ("teacher_kl", -0.1, 0.9, False, (-0.5, 1.0)),
        ("explained_variance", -0.2, 0.6, False, (-0.2, 0.6)),
        ("effective_sample_size", 0.97, 1.0, False, (0.97, 1.0)),
        ("engine_kl", 0.0, 0.0, False, (0, 0.5)),
    ],
)
def test_an_axis_holds_all_values_and_where_nothing_happens(name, low, high, logarithmic, ends):
    scale = scale_of([Curve([0, 1], [low, high], [low, low], [high, high])], SERIES[name])
    assert scale.logarithmic is logarithmic and (scale.low, scale.high) == pytest.approx(ends)
    assert 2 <= len(scale.ticks) <= 8
    for value in (low, high):
        if value > 0 or not logarithmic:
            assert -1e-9 <= scale.share(value) <= 1 + 1e-9


def test_rp_05_terms_have_definitions_and_numbers_have_marks(precisions):
    every = {name: [0.1, 0.3] for name in SERIES}
    page = html.render(variants([updated("a", 1, every)], [updated("b", 1, every)]))
    root = Tree(page).root
    ids = {n.attrs["id"] for n in root.walk() if "id" in n.attrs}
    assert {s.term for s in SERIES.values()} <= ids
    (table,) = section(precisions).find("table", "plain")
    assert all(td.find("span", "n") or "m" in td.classes for td in table.find("td"))
    assert '<a href="#learning">What the updates did</a>' in html.render(precisions)
    css = stylesheet()
    used = {
        c for n in root.walk() if n.tag in ("polyline", "polygon", "text") for c in n.classes if re.match("[cst]-", c)
    }
    assert all(f".{name}{{" in css for name in used)


def test_tables_have_the_last_fifth_of_each_series(precisions):
    rows = list(csv.DictReader(io.StringIO(tables.table_csv(all_figures(precisions)))))
    mine = {(r["variant"], r["metric"]): r for r in rows if r["metric"].startswith("learning.")}
    assert len(mine) == 3 * 4
    row = mine["C", "learning.engine_kl"]
    assert float(row["mean"]) == pytest.approx(1.05 * 5.2e-4) and row["unit"] == "nats per token"
    assert (
        float(row["sd"]) == pytest.approx(statistics.stdev([1.05 * 4e-4, 1.05 * 6.4e-4])) and row["kind"] == "measured"
    )
    data = comparison_figures(precisions)["variants"][2]
    assert data["learning"]["update_kl"]["last"] == pytest.approx([0.0021, 0.0022])
    assert data["engine_weight_bytes"] == 900_000.0


@pytest.mark.parametrize("seeds", [1, 3])
def test_nothing_is_said_of_updates_in_a_simulation(seeds):
    c = comparison(seeds=seeds, variants=2)
    assert shown(c) == [] and "learning" not in headings(view_of(c)) and section(c) is None
    page, text = html.render(c), markdown.render(c)
    assert "g-l-" not in page and "What the updates did" not in page + text
    assert "learning." not in tables.table_csv(all_figures(c))


def test_rp_12_a_summary_from_before_these_figures_can_still_be_reported(tmp_path):
    r = updated("old", 1, {"engine_kl": [1e-5, 2e-5]})
    tree = msgspec.to_builtins(r)
    del tree["engine_weight_bytes"]
    for step in tree["steps"]:
        del step["learning"]
    old = msgspec.json.decode(msgspec.json.encode(tree), type=RunSummary)
    c = variants([old])
    assert section(c) is None and section(learnt({"a": [[0.4, 0.8]]})) is None
    assert "kl.svg" not in write_report(c, tmp_path)


def test_rp_12_figures_by_step_survive_the_files(tmp_path):
    import pyarrow.parquet

    r = updated("a", 1, {"engine_kl": [1e-5, 2e-5], "teacher_kl": [None, 0.5]})
    for step in r.steps:
        step.gpu_seconds = dict.fromkeys(CAUSES, 0.0)
    beside = write_metrics(tmp_path / "metrics.parquet", r)
    assert [s.learning for s in read_summary(beside).steps] == [s.learning for s in r.steps]
    table = pyarrow.parquet.read_table(tmp_path / "metrics.parquet").to_pydict()
    assert table["learning.engine_kl"] == [1e-5, 2e-5] and table["learning.teacher_kl"] == [None, 0.5]
    assert "learning" not in table


# --- figures as files -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(precisions, tmp_path_factory):
    return write_report(precisions, tmp_path_factory.mktemp("figures"))


def test_real_runs_have_learning_figures_as_small_files(files):
    assert {k for k in files if "." in k} == {"reward.svg", "reward.png", "kl.svg", "kl.png"}
    for name in ("reward", "kl"):
        assert files[f"{name}.svg"].parent.name == "figures"
        assert files[f"{name}.png"].read_bytes()[:4] == b"\x89PNG"
        assert all(2_000 < files[f"{name}.{kind}"].stat().st_size < 150_000 for kind in ("svg", "png"))


def test_a_figure_says_what_it_is_and_names_its_axes(files):
    text = " ".join(re.findall(r">([^<>]+)</text>", files["reward.svg"].read_text())).replace(NB, " ")
    assert "s: reward by RL step, measured, 2 seeds" in text
    assert "RL step" in text and "mean reward of a batch" in text
    assert "A fp32: 0.50 → 0.50, change 0.00" in text and "lowest to highest" in text
    text = " ".join(re.findall(r">([^<>]+)</text>", files["kl.svg"].read_text())).replace(NB, " ")
    assert "Engine difference, k3, nats per token" in text and "Update difference, k3, nats per token" in text
    assert "C fp8 engines: 5.5 × 10⁻⁴ → 5.5 × 10⁻⁴" in text


def test_the_same_runs_give_the_same_files(precisions, files, tmp_path):
    again = write_report(precisions, tmp_path)
    for name in ("reward.svg", "kl.svg", "reward.png", "kl.png"):
        assert again[name].read_bytes() == files[name].read_bytes(), name


def test_a_distilled_run_shows_the_distance_to_its_teacher(tmp_path):
    c = variants([updated("opd", 1, {"teacher_kl": [0.9, 0.5], "engine_kl": [1e-5, 1e-5]})])
    text = write_report(c, tmp_path)["kl.svg"].read_text()
    assert "KL to the teacher, k1" in text and "Engine difference" not in text and "measured, seed 1" in text


def test_an_earlier_report_is_taken_away_with_its_figures(precisions, tmp_path):
    write_report(precisions, tmp_path / "report")
    drop_report(tmp_path)
    assert not (tmp_path / "report").exists()


def test_simulated_runs_have_no_learning_figures(tmp_path):
    assert not any("." in k for k in write_report(comparison(seeds=1, variants=1), tmp_path))
    assert not (tmp_path / "figures").exists()


@pytest.mark.parametrize(
    ("value", "spread", "text"),
    [
        (0.0, 0.0, "0"),
        (0.0123, 0.0, "0.012"),
        (0.0123, 0.004, "0.012 ± 0.004"),
        (0.001, 0.0, "0.0010"),
        (1.234e-4, 0.0, "1.2 × 10⁻⁴"),
        (1.234e-4, 0.3e-4, "(1.2 ± 0.3) × 10⁻⁴"),
        (2e-13, 0.0, "2.0 × 10⁻¹³"),
        (-2e-5, 0.0, "\u22122.0 × 10⁻⁵"),
        (37.4, 0.0, "37"),
        (1250.0, 0.0, "1,250"),
        (0.00203, 0.00009, "0.00203 ± 0.00009"),
    ],
)
def test_small_numbers_keep_two_digits(value, spread, text):
    assert scientific(value, spread).replace(NB, " ") == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.25, "0.25"), (-0.5, "\u22120.5"), (5e-4, "5 × 10⁻⁴"), (1e-6, "10⁻⁶"), (40.0, "40")]
)
def test_ticks_are_short(value, text):
    assert tick(value).replace(NB, " ") == text


@pytest.mark.parametrize(
    ("value", "text"), [(3.2e6, "3.20 MB"), (65.5e9, "65.5 GB"), (812.0, "812 B"), (9e5, "900 kB")]
)
def test_sizes_have_a_unit(value, text):
    assert size(value).replace(NB, " ") == text
