"""The report of a graph of stages: the graph as it is, every stage, every measurement."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from reports.stages import headline, markdown, render, whom_rl_trains, write_stages_report
from reports.stages_plot import graph
from testbed.metrics.scores import Mean, Score
from testbed.metrics.stages import StagePlan, StageResult, StagesResult

PLAN = [
    StagePlan("sft", "sft", "tiny-qwen3", {}, ["sft"]),
    StagePlan("plus", "rl", "sft", {}, ["sft", "plus"]),
    StagePlan("minus", "rl", "sft", {}, ["sft", "minus"]),
    StagePlan("student", "opd", "sft", {"sums": "plus", "rest": "minus"}, ["sft", "student"]),
    StagePlan("score", "evaluate", "student", {}, ["sft", "student"]),
]
WEIGHTS = "ab" * 32


def result(done: int = 5) -> StagesResult:
    results = [
        StageResult("sft", "sft", "1", "tiny-qwen3", [], "checkpoints/sft", steps=45, answer_probability=0.42),
        StageResult(
            *("plus", "rl", "2", "sft", [], "checkpoints/plus"),
            inputs={"sft": WEIGHTS},
            steps=40,
            first=Mean(0.41, 0.39, 0.43, 8),
            last=Mean(0.81, 0.79, 0.83, 8),
        ),
        StageResult("minus", "rl", "3", "sft", [], "checkpoints/minus", inputs={"sft": WEIGHTS}, steps=40),
        StageResult(
            *("student", "opd", "4", "sft", ["plus", "minus"], "checkpoints/student"),
            first_kl=Mean(0.33, 0.31, 0.35, 8),
            last_kl=Mean(0.05, 0.04, 0.06, 8),
        ),
        StageResult(
            *("score", "evaluate", "5", "student", []),
            scores=[
                Score("", Mean(0.78, 0.75, 0.81, 512)),
                Score("sums", Mean(0.8, 0.76, 0.84, 250)),
                Score("rest", Mean(0.76, 0.72, 0.8, 262)),
            ],
        ),
    ]
    return StagesResult("two", "Who <teaches>?", "testbed real two.yaml", 3, PLAN, results[:done], {"torch": "2.13"})


def test_op_09_solid_arrows_train_and_dashed_ones_inform() -> None:
    drawing = ElementTree.fromstring(graph(PLAN, {})[0])
    arrows = {
        line.find("title").text: "ref" in line.get("class", "").split()  # type: ignore[union-attr]
        for line in drawing.iter("polyline")
    }
    assert arrows == {
        "tiny-qwen3 → sft": False,
        "sft → plus": False,
        "sft → minus": False,
        "sft → student": False,
        "plus → student": True,
        "minus → student": True,
    }
    boxes = {r.find("title").text for r in drawing.iter("rect")}  # type: ignore[union-attr]
    assert boxes == {"tiny-qwen3: from outside", "sft: sft", "plus: rl", "minus: rl", "student: opd"}


def test_boxes_lie_apart_and_inside_and_arrows_pass_beside_them() -> None:
    drawing = ElementTree.fromstring(graph(PLAN, {"student": ["opd · reward 0.4 → 0.8", "held out 0.78"]})[0])
    width, height = (float(v) for v in drawing.get("viewBox", "").split()[2:])
    boxes = []
    for r in drawing.iter("rect"):
        x, y, w, h = (float(r.get(k, "nan")) for k in ("x", "y", "width", "height"))
        assert x >= 0 and x + w <= width and y >= 0 and y + h <= height
        boxes.append((x, y, x + w, y + h))
    for i, a in enumerate(boxes):
        for b in boxes[i + 1 :]:
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (a, b)
    for line in drawing.iter("polyline"):
        points = [tuple(map(float, p.split(","))) for p in line.get("points", "").split()]
        for (x1, y1), (x2, y2) in pairwise(points):
            for t in range(1, 20):
                x, y = x1 + (x2 - x1) * t / 20, y1 + (y2 - y1) * t / 20
                inside = [b for b in boxes if b[0] + 1 < x < b[2] - 1 and b[1] + 1 < y < b[3] - 1]
                assert not inside, (line.find("title").text, inside)  # type: ignore[union-attr]


def test_op_08_the_report_says_whom_rl_trains() -> None:
    assert whom_rl_trains(PLAN) == [
        "RL trains plus, a teacher of student; the student itself gets no RL",
        "RL trains minus, a teacher of student; the student itself gets no RL",
    ]
    goes_on = [
        StagePlan("student", "opd", "sft", {"0": "teacher"}, ["sft", "student"]),
        StagePlan("more", "rl", "student", {}, ["sft", "student", "more"]),
    ]
    assert whom_rl_trains(goes_on) == ["RL trains more: the model that distillation made (student) goes on"]


def test_page_and_markdown_have_every_stage_and_every_figure(tmp_path: Path) -> None:
    page, text = render(result(), {"plus"}), markdown(result())
    for said in ("0.410 [0.390, 0.430]", "0.810 [0.790, 0.830]", "KL 0.330 [0.310, 0.350]", "p(answer) 0.420"):
        assert said in page and said in text
    for said in ("0.800 [0.760, 0.840]", "0.760 [0.720, 0.800]", "plus (sums), minus (rest)", WEIGHTS[:12]):
        assert said in page and said in text
    assert "Who &lt;teaches&gt;?" in page and "testbed real two.yaml" in page
    assert re.findall(r'href="([^"#]+)"', page) == ["plus/report/index.html"]
    assert "http" not in page.replace("http://www.w3.org", ""), "self-contained"
    paths = write_stages_report(result(), tmp_path)
    assert paths["index"].read_text() == render(result(), set()) and paths["report"].read_text() == text


@pytest.mark.parametrize(
    ("done", "said"),
    [
        (5, "Mean reward on held-out tasks: student 0.78"),
        (3, "plus: mean reward from 0.41 to 0.81 in 40 batches"),
        (1, "1 of 5 stages are finished"),
        (0, "0 of 5 stages are finished"),
    ],
)
def test_a_part_of_the_graph_is_a_report_too(done: int, said: str) -> None:
    assert headline(result(done)) == said
    page = render(result(done), set())
    assert page.count("not run") == 5 - done
