"""The page: structure, marks, areas, accessibility, and nothing from outside."""

import re
from html.parser import HTMLParser

import pytest

from reports import VariantRuns, build_comparison, html, write_run_report
from reports.comparison import all_figures
from reports.kinds import BY_NAME
from reports.pages import stylesheet
from reports.palette import GPU_TIME, VARIANTS, variables
from tests.reports.invented import comparison, run, split, variant

VOID = {"meta", "link", "br", "img", "input", "hr"}
DRAWN = {"rect", "line", "use", "path", "circle"}


class Node:
    def __init__(self, tag, attrs, parent):
        self.tag, self.attrs, self.parent, self.children = tag, dict(attrs), parent, []

    @property
    def classes(self):
        return (self.attrs.get("class") or "").split()

    def walk(self):
        yield self
        for c in self.children:
            if isinstance(c, Node):
                yield from c.walk()

    def find(self, tag=None, cls=None):
        return [n for n in self.walk() if (tag is None or n.tag == tag) and (cls is None or cls in n.classes)]

    def text(self, without=("title",)):
        return "".join(c if isinstance(c, str) else "" if c.tag in without else c.text(without) for c in self.children)


class Tree(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.root = self.at = Node("root", {}, None)
        self.feed(page)
        assert self.at is self.root, f"unclosed {self.at.tag}"

    def handle_starttag(self, tag, attrs):
        node = Node(tag, attrs, self.at)
        self.at.children.append(node)
        if tag not in VOID:
            self.at = node

    def handle_startendtag(self, tag, attrs):
        self.at.children.append(Node(tag, attrs, self.at))

    def handle_endtag(self, tag):
        assert self.at.tag == tag, f"{tag} closes {self.at.tag}"
        self.at = self.at.parent

    def handle_data(self, data):
        self.at.children.append(data)


@pytest.fixture(scope="module")
def source():
    return html.render(comparison())


@pytest.fixture(scope="module")
def page(source):
    return Tree(source).root


@pytest.fixture(scope="module")
def twelve():
    return Tree(html.render(comparison(seeds=2, variants=12))).root


def test_nothing_is_loaded_from_outside(source):
    assert not re.search(r"https?://|//cdn|@import|url\((?!#)", source)
    assert "<link" not in source and " src=" not in source


def test_ids_are_unique_and_links_resolve(page):
    ids = [n.attrs["id"] for n in page.walk() if "id" in n.attrs]
    assert len(ids) == len(set(ids))
    targets = [n.attrs["href"] for n in page.walk() if n.tag in ("a", "use")]
    targets += ["#" + n.attrs["data-g"] for n in page.walk() if n.attrs.get("data-g")]
    assert targets
    assert {t.removeprefix("#") for t in targets} <= set(ids)
    used = set(re.findall(r"url\(#([\w-]+)\)", " ".join(n.text(()) for n in page.find("style"))))
    assert used <= set(ids)


def test_definitions_follow_their_terms(page):
    for dl in page.find("dl", "gl"):
        for div in dl.find("div"):
            assert [c.tag for c in div.children if isinstance(c, Node)] == ["dt", "dd"]


def test_rp_05_every_number_carries_the_mark_of_its_kind(page):
    shown = page.find("span", "n")
    assert len(shown) > 60
    for n in shown:
        marks = n.find("svg", "k")
        assert len(marks) == 1 and marks[0].attrs["aria-label"] in BY_NAME and marks[0].attrs["role"] == "img"
        assert re.search(r"\d", n.text())
    (table,) = page.find("table", "vt")
    cells = [td for td in table.find("td") if "barc" not in td.classes]
    assert len(cells) == 5 * 6 and all(len(td.find("span", "n")) == 1 for td in cells)
    for table in page.find("table", "plain"):
        for td in table.find("td"):
            assert td.find("span", "n") or "m" in td.classes


def test_rp_05_figures_in_sentences_are_marked_numbers(page):
    for node in page.find("h2") + page.find("h1") + page.find("p", "basis"):
        bare = node.text(("title", "span")) if node.tag != "p" else ""
        bare = re.sub(r"40 \+ 24|η = \d|1,000 steps|× \d+ GPUs", "", bare)
        assert not re.search(r"\d", bare), bare


def test_rp_05_every_plot_says_its_kind_once(page):
    for section in page.find("section"):
        if section.find("svg", "fig"):
            (caption,) = section.find("p", "lead")
            assert len(caption.find("span", "ck")) == 1


def test_each_plot_is_drawn_wide_and_narrow(page):
    for section in page.find("section"):
        figures = section.find("svg", "fig")
        if figures:
            assert [("w" in f.classes, "nw" in f.classes) for f in figures] == [(True, False), (False, True)]
            wide, narrow = (float(f.attrs["viewbox"].split()[2]) for f in figures)
            assert wide in (592, 1216) and narrow == 358
            assert all(f.attrs["role"] == "img" and f.attrs["aria-label"] for f in figures)


def _lane_rects(svg):
    """Bars of GPU time of a drawing, grouped by the top of their lane."""
    lanes = {}
    for r in svg.find("rect"):
        cause = next((c.removeprefix("c-") for c in r.classes if c.removeprefix("c-") in GPU_TIME), None)
        if cause:
            lanes.setdefault(float(r.attrs["y"]), []).append((cause, float(r.attrs["width"]), float(r.attrs["height"])))
    return [lanes[y] for y in sorted(lanes)]


def test_rp_06_areas_of_the_plot_are_the_gpu_time(page):
    (section,) = [s for s in page.find("section") if s.attrs.get("id") == "gpu"]
    lanes = _lane_rects(section.find("svg", "fig")[0])
    expected = [(f, lane) for f in all_figures(comparison()) for lane in f.lanes]
    assert len(lanes) == len(expected)
    scale = None
    for bars, (_, lane) in zip(lanes, expected, strict=True):
        assert {cause for cause, _, _ in bars} == set(lane.seconds)
        area = sum((w + 0.6) * h for _, w, h in bars)  # 0.6 px of ground between two parts
        truth = lane.length * lane.gpus
        scale = scale or area / truth
        assert area / truth == pytest.approx(scale, rel=0.01)
        for cause, w, h in bars:
            assert (w + 0.6) * h == pytest.approx(scale * lane.seconds[cause] * lane.gpus, abs=1.2 * h)


def test_rp_06_areas_of_the_tables_bars_are_the_gpu_time(page):
    bars = page.find("svg", "mini")
    assert len(bars) == 5
    for svg, f in zip(bars, all_figures(comparison()), strict=True):
        rects = svg.find("rect")
        total = sum(float(r.attrs["data-gpus"]) * float(r.attrs["data-seconds"]) for r in rects)
        assert total == pytest.approx(64 * f.mean("step_time_s"), rel=1e-4)
        areas = [float(r.attrs["width"]) * float(r.attrs["height"]) for r in rects]
        ratios = [
            a / (float(r.attrs["data-gpus"]) * float(r.attrs["data-seconds"]))
            for a, r in zip(areas, rects, strict=True)
        ]
        assert max(ratios) == pytest.approx(min(ratios), rel=0.01)


def test_rp_07_both_readings_of_staleness_are_drawn(page):
    (section,) = [s for s in page.find("section") if s.attrs.get("id") == "staleness"]
    drawing = section.find("svg", "fig")[0]
    words = [t.text() for t in drawing.find("text")]
    assert "at completion" in words and "at dequeue" in words
    assert "oldest_token" in section.text()
    titles = [t.text(()) for r in drawing.find("rect") for t in r.find("title")]
    assert f"staleness 2: {82.0}\u00a0%" in titles  # D at dequeue: 525 of 640
    assert len(drawing.find("line", "ref")) == 3  # C, D and E have a bound


def test_ws_10_pause_and_overlap_are_drawn_apart(page):
    (section,) = [s for s in page.find("section") if s.attrs.get("id") == "update"]
    words = [t.text() for t in section.find("svg", "fig")[0].find("text")]
    assert "paused 9.0\u00a0s" in words and "paused 1.7\u00a0s" in words and "generation continues" in words
    assert "nothing to pause: the pool is between phases" in words


def test_columns_sort_by_keyboard(page):
    heads = page.find("thead")[0].find("th")
    buttons = page.find("button", "sort")
    assert len(heads) == 8 and len(buttons) == 7
    assert [h.attrs.get("aria-sort") for h in heads] == [
        "ascending",
        "none",
        None,
        "none",
        "none",
        "none",
        "none",
        "none",
    ]
    for row in page.find("tbody")[0].find("tr"):
        cells = [c for c in row.children if isinstance(c, Node)]
        for b in buttons:
            float(cells[int(b.attrs["data-k"])].attrs["data-s"])


def test_sort_keys_are_the_figures(page):
    for row, f in zip(page.find("tbody")[0].find("tr"), all_figures(comparison()), strict=True):
        for td in row.find("td"):
            if "data-metric" in td.attrs:
                assert float(td.attrs["data-s"]) == pytest.approx(f.mean(td.attrs["data-metric"]))


def test_best_are_marked_and_ties_of_more_than_two_are_not(page, twelve):
    def best(root, metric):
        rows = root.find("tbody")[0].find("tr")
        return [
            i
            for i, r in enumerate(rows)
            for td in r.find("td")
            if td.attrs.get("data-metric") == metric and td.find(cls="best")
        ]

    assert best(page, "step_time_s") == [3]
    assert best(page, "staleness_dequeue_mean") == [0, 1]
    assert best(page, "waste_share") == []  # four variants drop nothing
    assert best(twelve, "staleness_dequeue_mean") == []


def test_variants_have_letters_beside_their_colour(page, twelve):
    assert [r.find("b", "chip")[0].text() for r in page.find("tbody")[0].find("tr")] == list("ABCDE")
    assert [r.find("b", "chip")[0].text() for r in twelve.find("tbody")[0].find("tr")] == list("ABCDEFGHIJKL")
    css = stylesheet()
    for letter in "ABCDEFGHIJKL":
        rule = re.search(rf"\.chip\.v{letter}\{{([^}}]*)\}}", css).group(1)
        assert (f"var(--v{letter})" in rule) is (letter in VARIANTS)
        assert ("inset 0 0 0 1px var(--ink)" in rule) is (letter not in VARIANTS)


def test_legend_has_the_causes_that_occur_and_no_others(page):
    key = next(u for u in page.find("ul", "key") if u.attrs.get("aria-label"))
    shown = [a.attrs["href"] for a in key.find("a")]
    assert "#g-c-idle_no_work" not in shown
    assert shown == [f"#g-c-{c}" for c in GPU_TIME if c != "idle_no_work"]


def test_colours_are_variables_in_both_themes(source):
    body = source[source.index("<body>") :]
    assert not re.search(r"#[0-9a-fA-F]{6}\b", body.split("<pre")[0])
    names = set(re.findall(r"--([\w-]+):", variables(False)))
    assert names == set(re.findall(r"--([\w-]+):", variables(True)))
    assert set(re.findall(r"var\(--([\w-]+)\)", source)) <= names


def test_drawn_roles_have_a_style(page):
    css = stylesheet()
    used = {c for n in page.walk() if n.tag in ("rect", "line", "text") for c in n.classes if re.match(r"[cst]-", c)}
    assert used
    for name in used:
        assert f".{name}{{" in css, name


def test_page_adapts_to_theme_width_and_print(source):
    for query in (
        "prefers-color-scheme:dark",
        "max-width:1100px",
        "max-width:860px",
        "@media print",
        "size:A4 landscape",
    ):
        assert query in source
    assert 'id="theme"' in source


def test_single_run_has_no_comparison_words(tmp_path):
    paths = write_run_report(variant(3, 1).runs[0], tmp_path / "run")
    root = Tree(paths["index"].read_text(encoding="utf-8")).root
    text = root.find("main")[0].text().split("Glossary")[0]
    assert "instead of" not in text and "best of its column" not in text and "difference to" not in text
    assert not root.find(cls="best")


def test_user_text_is_escaped():
    c = comparison(seeds=1, question="<script>alert(1)</script>", study="a & b")
    c.variants[1].name = '"><b>'
    text = html.render(c)
    assert "<script>alert(1)" not in text and "&lt;script&gt;alert(1)" in text
    Tree(text)


def test_hybrid_pools_draw_one_lane_each():
    lanes = [
        ("rollout", "engines", 40, {"generate": 100.0}),
        ("flex", "shared", 24, {"generate": 30.0, "train": 60.0, "phase_switch": 10.0}),
    ]
    c = build_comparison(study="s", question="q", variants=[VariantRuns("", "hybrid", "", [run("hybrid", lanes)])])
    text = html.render(c)
    assert "shared, 24" in text and "engines, 40" in text


def test_the_page_is_the_same_every_time():
    assert html.render(comparison(seeds=1)) == html.render(comparison(seeds=1))


def test_unequal_engines_and_trainer_heights_follow_their_gpus():
    lanes = split({"generate": 100.0}, {"train": 100.0}, 48, 16)
    c = build_comparison(study="s", question="q", variants=[VariantRuns("", "x", "", [run("x", lanes)])])
    bars = _lane_rects(next(f for f in Tree(html.render(c)).root.find("svg", "fig") if "w" in f.classes))
    assert bars[0][0][2] / bars[1][0][2] == pytest.approx(3.0, rel=0.01)
