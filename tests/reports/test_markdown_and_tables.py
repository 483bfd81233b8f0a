"""Markdown and CSV hold the same figures as everything else."""

import csv
import io
import subprocess
import sys

import pytest

from reports import comparison_figures, markdown, tables, write_report
from reports.comparison import all_figures
from reports.kinds import BY_NAME
from reports.metrics import METRICS
from tests.reports.invented import comparison


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_report(comparison(), tmp_path_factory.mktemp("report") / "new" / "folder")


def test_the_files_are_written(written):
    assert {k: p.name for k, p in written.items()} == {
        "index": "index.html",
        "report": "report.md",
        "table": "table.csv",
        "gpu_time": "gpu_time.csv",
    }
    assert all(p.stat().st_size > 1000 for p in written.values())


def test_rp_05_csv_has_every_figure_with_its_kind(written):
    rows = list(csv.DictReader(io.StringIO(written["table"].read_text(encoding="utf-8"))))
    figures = {v["letter"]: v["figures"] for v in comparison_figures(comparison())["variants"]}
    assert len(rows) == len(METRICS) * 5
    for row in rows:
        truth = figures[row["variant"]][row["metric"]]
        assert float(row["mean"]) == truth["mean"] and float(row["sd"]) == truth["sd"]
        assert row["kind"] == truth["kind"] and row["unit"] == truth["unit"] and row["seeds"] == "5"


def test_rp_06_gpu_time_csv_closes(written):
    rows = list(csv.DictReader(io.StringIO(written["gpu_time"].read_text(encoding="utf-8"))))
    for f in all_figures(comparison()):
        mine = [r for r in rows if r["variant"] == f.letter]
        area = sum(float(r["seconds_per_step"]) * int(r["gpus"]) for r in mine)
        assert area == pytest.approx(64 * f.mean("step_time_s"))
        for lane in {r["pool"] for r in mine}:
            assert sum(float(r["share_of_lane"]) for r in mine if r["pool"] == lane) == pytest.approx(1.0)


def test_markdown_says_what_the_json_says(written):
    text = written["report"].read_text(encoding="utf-8")
    data = comparison_figures(comparison())
    plain = text
    for kind in BY_NAME.values():
        plain = plain.replace(f" {kind.mark}", "")
    plain = plain.replace("**", "")
    assert data["answer"] in plain
    for finding in data["findings"].values():
        assert finding in plain


def test_markdown_table_has_the_figures_with_marks(written):
    lines = written["report"].read_text(encoding="utf-8").splitlines()
    for f in all_figures(comparison()):
        (row,) = [
            x
            for x in lines
            if x.startswith(f"| **{f.letter}** {f.name}") and "USD" not in x and f.text("step_time_s") in x
        ]
        for metric in (
            "step_time_s",
            "trained_tokens_per_s_per_gpu",
            "cost_usd_per_1000_steps",
            "waste_share",
            "gpu_idle_share",
        ):
            assert f.text(metric) in row
        assert row.count("○") == 6
    width = {x.count("|") for x in lines if x.startswith("| **") and "USD" not in x}
    assert len(width) <= 2  # the first table's and the GPU time table's


def test_markdown_and_csv_of_many_variants_render():
    c = comparison(seeds=1, variants=12)
    assert "**L**" in markdown.render(c)
    assert tables.table_csv(all_figures(c)).count("\n") == 1 + 12 * len(METRICS)


def test_reports_import_no_backend_and_no_plotting_until_needed():
    code = (
        "import sys, reports; bad = {'torch', 'sim', 'real', 'simpy', 'matplotlib', 'pandas'} & set(sys.modules); "
        "print(sorted(bad)); sys.exit(bool(bad))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
