"""`testbed published`: what it writes, when it fails, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Cli

QUICK = ("--only", "miles_weight_transfer", "--jobs", "1")


def test_it_writes_a_page_markdown_and_figures(cli: Cli, tmp_path: Path) -> None:
    done = cli("published", *QUICK, "--out", "out", "--json", "f.json", "--doc", "doc/published.md")
    assert done.code == 0, done.err
    assert "8 predicted" in done.out and "6 of 6 orders hold" in done.out
    figures = json.loads((tmp_path / "f.json").read_text())
    assert figures["predicted"] == 8 and figures["wrong_orders"] == []
    (broadcast,) = [n for n in figures["tables"][0]["numbers"] if n["name"] == "GLM-5 744B, broadcast"]
    assert broadcast["published"] == 58.3015 and broadcast["role"] == "predicted"
    assert broadcast["error"] == broadcast["simulated"] / 58.3015 - 1
    for file in ("out/index.html", "out/report.md", "out/published.json", "doc/published.md"):
        assert (tmp_path / file).stat().st_size > 1000
    assert str(tmp_path) not in (tmp_path / "doc/published.md").read_text()


def test_check_passes_or_says_what_is_too_large(cli: Cli) -> None:
    assert cli("published", *QUICK, "--out", "out", "--check", "--max-error", "0.5").code == 0
    done = cli("published", *QUICK, "--out", "out", "--check", "--max-error", "0.01")
    assert done.code == 1
    assert "median error of predicted numbers" in done.err and "above 1.0 %" in done.err


def test_fit_shows_what_is_stored(cli: Cli) -> None:
    done = cli("published", "--only", "colocated_update", "--fit")
    assert done.code == 0 and "ipc_tensor_s 0.0002289 (stored: 0.0002289)" in done.out


def test_bad_input_is_one_message(cli: Cli, tmp_path: Path) -> None:
    done = cli("published", "--only", "miles")
    assert done.code == 2 and "--only miles: no such table (nearest: miles_" in done.err
    done = cli("published", *QUICK, "--scenarios", "nowhere")
    assert done.code == 2 and "no such file" in done.err
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    done = cli("published", *QUICK, "--out", "mine")
    assert done.code == 2 and "holds something else" in done.err
    assert "Traceback" not in done.err
