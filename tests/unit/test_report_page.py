"""The report as it is read: what it says, that it needs nothing from anywhere, and is escaped."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from report_facts import BEGAN, data_uri, evaluation, facts, png, sample, series

from labctl.insight.quantization.measurements import QuantizedModel, QuantizedRow
from labctl.insight.report.facts import Bill, ReportFacts
from labctl.insight.report.page import MOST_MATRIX, MOST_PAIRS, build_page
from labctl.insight.report.render import render
from labctl.insight.scalars import Scalars
from labctl.insight.speedup import Speedup, StepTime
from labctl.model import Run
from labctl.runs.evaluation import Evaluation, Predictions
from labctl.runs.provenance import RunOrigin, ServerHardware

TEMPLATES = Path(__file__).parents[2] / "templates" / "report"
EVIL = "<script>alert('x')</script>\" onload=\"alert(1)"
VOID = {"meta", "img", "br", "input", "link", "hr"}


class Reader(HTMLParser):
    """Tags, texts by tag, and whether every tag is closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for found, attrs in self.tags if found == tag]

    @property
    def words(self) -> str:
        return re.sub(r"\s+", " ", self.text)


def read(found: ReportFacts) -> Reader:
    return Reader(render(build_page(found), TEMPLATES))


def test_it_says_what_was_measured_first() -> None:
    said = read(facts()).words
    assert "90.0% of the test set classified correctly" in said
    assert "18 of 20 items. The 95% confidence interval is 69.9 to 97.2% (Wilson)." in said
    assert "always predicting the majority class would get 50.0%" in said
    assert "after 3 epochs: 90.0% on validation, the best of the saved checkpoints" in said


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (0.4766, " (Wilson). Loss 0.4766, perplexity 1.61. Baseline"),
        (1e308, " (Wilson). Baseline"),
        (-1.0, " (Wilson). Baseline"),
        (None, " (Wilson). Baseline"),
    ],
)
def test_a_language_model_has_a_perplexity(loss: float | None, text: str) -> None:
    measured = Evaluation(
        checkpoint="step-1", classes=(), confusion=(), accuracy=0.85, items=100, loss=loss
    )
    said = read(facts(evaluation=measured)).words
    assert "85.0% of the test set predicted correctly" in said
    assert text in said


def test_it_says_what_it_ran_on_and_cost() -> None:
    rows = {row.name: row.value.replace("\u00a0", " ") for row in build_page(facts()).server}
    assert rows["Server"] == "aws g4dn.xlarge (spot)"
    assert rows["GPU"] == "NVIDIA T4 (16.0 GiB)"
    assert rows["GPU driver"] == "550.90"
    assert rows["GPU use"].startswith("80% busy, 60 W, memory up to 8.0 GiB of 16.0 GiB")
    assert rows["GPU energy"] == "9.8 Wh, by the GPU's own counter"
    assert (rows["Cost of this run"], rows["Server idle"]) == (
        "$0.03",
        "25.0%",
    )
    assert (
        "taken back; resumed from step 20 (5 steps were repeated), 95 s later"
        in (rows["Servers lost during the run"])
    )


def test_a_run_that_is_free_says_so_once() -> None:
    bill = Bill(price_usd_per_hour=0.0, run_usd=0.0)
    tiles = {tile.name: tile for tile in build_page(facts(bill=bill)).tiles}
    assert (tiles["Cost of the run"].value, tiles["Cost of the run"].note) == ("free", "")


def test_it_says_where_it_comes_from_and_how_to_make_it_again() -> None:
    made = build_page(facts())
    rows = {row.name: row.value for row in made.provenance}
    assert rows["Git commit"] == "e" * 40
    assert rows["Uncommitted changes"] == "none"
    assert rows["Weights, SHA-256"] == "c" * 64
    assert rows["Data (test), SHA-256"] == "d" * 64
    assert rows["Image digest"] == "none: it was built on the server"
    assert rows["Variable SEED"] == "1"
    assert made.commands.splitlines()[:3] == [
        f"git checkout {'e' * 40}",
        "labctl up",
        "labctl run -- python train.py",
    ]
    assert made.agreement.startswith("Both accuracies are equal")
    assert made.warning == ""


def test_a_tree_with_changes_is_warned_of() -> None:
    code = RunOrigin(commit="e" * 40, dirty=True, changed=("train.py",))
    made = build_page(facts(code=code))
    assert made.warning.endswith("not in this commit: train.py")
    assert ("Uncommitted changes", "yes: train.py") in {(r.name, r.value) for r in made.provenance}


def test_a_server_that_says_something_else_is_told() -> None:
    other = evaluation(accuracy=0.9, data_sha256="f" * 64)
    assert "different data" in build_page(facts(server=other)).agreement
    assert "differ" in build_page(facts(server=None, server_accuracy=0.5)).agreement
    assert "Only one" in build_page(facts(here=None)).agreement


def test_of_a_run_about_which_nothing_is_known_it_says_not_measured() -> None:
    bare = ReportFacts(lab="digits", run=Run(id="first", lab_id="l", server_id="s", state="lost"))
    made, html = build_page(bare), read(bare)
    for row in made.server:
        assert row.value == "not measured", row.name
    assert {row.value for row in made.provenance} == {"first", "not measured"}
    assert html.words.count("not measured") >= len(made.server)
    assert "Not evaluated yet" in html.words
    assert "Curves: not measured" in html.words


def test_nan_everywhere() -> None:
    nan = float("nan")
    scalars = Scalars(series=(series("train/loss", nan, nan), series("val/accuracy", nan)))
    said = read(facts(scalars=scalars)).words
    assert said.count("all values are NaN or infinite") == 2


def test_machines_without_a_gpu_have_none_and_not_an_unknown_one() -> None:
    machine = ServerHardware(cpus=2, memory_bytes=1)
    rows = {r.name: r.value for r in build_page(facts(machine=machine, samples=())).server}
    assert (rows["GPU"], rows["GPU driver"], rows["GPU use"]) == ("none", "none", "none")
    assert rows["CPU use"] == "not measured"


def test_the_page_needs_nothing_from_anywhere_and_runs_nothing() -> None:
    html = read(facts())
    assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & {
        tag for tag, _ in html.tags
    }
    for tag, attrs in html.tags:
        assert not [name for name in attrs if name.startswith("on")], tag
        assert str(attrs.get("href") or "#").startswith("#")
        assert str(attrs.get("src") or "data:image/").startswith("data:image/")
    (policy,) = [a for a in html.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert str(policy["content"]).startswith("default-src 'none'; style-src 'unsafe-inline'")
    assert not re.search(r"url\(|@import|https?:", (TEMPLATES / "report.css").read_text())


def measured(*steps: tuple[str, int, float], name: str = "gloo") -> Speedup:
    rows = [
        StepTime(variant=variant, processes=processes, seconds_per_step=seconds)
        for variant, processes, seconds in steps
    ]
    return Speedup(rows=tuple(rows), device=name, backend=name, batch_size=60)


def test_a_speed_up_has_a_curve_for_each_exchange_beside_the_ideal() -> None:
    steps = [("alone", 1, 0.4), ("whole", 4, 0.2), ("whole", 2, 0.25), ("fp16", 2, 0.2)]
    part = build_page(facts(speedup=measured(*steps))).speedup
    assert part is not None
    assert part.chart is not None
    assert [(line.label, line.value) for line in part.chart.lines] == [
        ("whole", "2"),
        ("fp16", "2"),
        ("ideal", "4"),
    ]
    assert [tick.text for tick in part.chart.x_ticks] == ["1", "2", "3", "4"]
    assert [row.speedup for row in part.rows] == ["1", "2", "1.6", "2"]
    assert "Together, the processes compute 60\u00a0items a step." in part.note


def test_a_speed_up_of_one_process_is_a_table_alone() -> None:
    html = read(facts(speedup=measured(("alone", 1, 0.4))))
    assert "400 ms" in html.words.replace("\u00a0", " ")
    assert "ideal" not in html.words
    assert "Speed-up" not in read(facts()).words


def quantize(
    *correct: int, names: tuple[str, ...] = ("float32", "int4 (PTQ)", "int4 (QAT)")
) -> Any:
    rows = tuple(
        QuantizedRow(name=name, size_bytes=size, latency_ms=0.5, correct=right, total=1000)
        for name, size, right in zip(names, (400_000, 50_000, 50_000), correct, strict=True)
    )
    return facts(quantization=QuantizedModel(model="int4", rows=rows, note="QAT trained longer."))


def test_quantized_weights_stand_side_by_side_with_what_their_intervals_mean() -> None:
    words = read(quantize(962, 958, 960)).words.replace("\u00a0", " ")
    assert "float32391 KiB0.5 ms96.2% 94.8 to 97.2%" in words
    assert "int4 (PTQ)48.8 KiB0.5 ms95.8% 94.4 to 96.9%" in words
    assert "int4 (QAT) is 8.0 times smaller than float32. All 95% intervals overlap" in words
    assert "1,000 items do not show that rounding changed the accuracy" in words
    assert "QAT trained longer." in words
    worse = read(quantize(962, 800, 960)).words
    assert "int4 (PTQ) is less accurate than float32: the 95% intervals do not overlap." in worse
    assert "int4 (QAT) is more accurate" in read(quantize(800, 800, 962)).words
    assert "Quantized weights" not in read(facts()).words


def test_quantized_weights_with_predictions_are_tested_in_pairs() -> None:
    truth = (1,) * 1000
    rows = tuple(
        msgspec.structs.replace(
            row,
            predictions=Predictions(
                order_sha256="0" * 64,
                truth=truth,
                predicted=(1,) * row.correct + (0,) * (row.total - row.correct),
            ),
        )
        for row in quantize(962, 930, 960).quantization.rows
    )
    words = read(facts(quantization=QuantizedModel(model="int4", rows=rows))).words
    words = words.replace("\u00a0", " ")
    assert "Only float32 is right on 32 items, only int4 (PTQ) on 0. McNemar's test" in words
    assert "float32 is better: this is significant at 5%." in words
    assert "only int4 (QAT) on 0. McNemar's test (exact): p = 0.5; with 3 comparisons" in words
    assert "Only int4 (PTQ) is right on 0 items, only int4 (QAT) on 30." in words
    assert "overlap" not in words
    other = msgspec.structs.replace(rows[1].predictions, order_sha256="1" * 64)
    rows = (rows[0], msgspec.structs.replace(rows[1], predictions=other))
    words = read(facts(quantization=QuantizedModel(model="int4", rows=rows))).words
    assert "float32 and int4 (PTQ) are not compared: their predictions are not in the" in words


def hostile(text: str) -> ReportFacts:
    """The same text wherever somebody else's text may stand."""
    found = evaluation(classes=(text, "b"), checkpoint=text, split=text, device=text)
    worst = tuple(msgspec.structs.replace(one, item=text) for one in found.worst)
    found = msgspec.structs.replace(found, worst=worst, checkpoint_sha256=text, data_sha256=text)
    known = facts()
    return facts(
        lab=text,
        run=msgspec.structs.replace(
            known.run,
            id=text,
            summary=text,
            image=text,
            image_id=text,
            image_digest=text,
            command=(text,),
        ),
        evaluation=found,
        here=found,
        server=found,
        scalars=Scalars(series=(series(f"val/{text}", 1, 2), series(text, 1.0))),
        samples=tuple(sample(10 * n, gpu={"name": text, "throttle": (text,)}) for n in range(5)),
        code=RunOrigin(commit=text, dirty=True, changed=(text,), command=(text,), env={text: text}),
        machine=ServerHardware(os=text, kernel=text, docker=text, arch=text, cpus=1),
        speedup=measured((text, 1, 0.4), (text, 2, 0.3), name=text),
        quantization=quantize(1, 1, 1, names=(text,) * 3).quantization,
        notes=(text,),
    )


@pytest.mark.parametrize("text", [EVIL, "</style><script>", "a\x1b[2J\x00b", "‮evil", "x" * 200])
def test_whatever_others_wrote_is_text_and_nothing_else(text: str) -> None:
    plain, html = read(hostile("harmless")), read(hostile(text))
    assert [tag for tag, _ in html.tags] == [tag for tag, _ in plain.tags]
    assert [set(attrs) for _, attrs in html.tags] == [set(attrs) for _, attrs in plain.tags]
    assert not {"\x1b", "\x00", "\u202e"} & set(html.text)


def test_a_picture_that_is_none_is_left_out_and_that_is_said() -> None:
    found = evaluation()
    huge = msgspec.structs.replace(found.worst[0], picture=data_uri(png(60_000, 60_000)))
    html = read(facts(evaluation=msgspec.structs.replace(found, worst=(huge,))))
    assert html.all("img") == []
    assert "no picture: it has 60,000 x 60,000 pixels" in html.words


def test_a_picture_by_its_path_comes_from_what_was_gathered() -> None:
    found = evaluation()
    named = msgspec.structs.replace(found.worst[0], picture="mistakes/1.png")
    known = msgspec.structs.replace(found, worst=(named,))
    shown = read(facts(evaluation=known, pictures={"mistakes/1.png": data_uri(png())}))
    assert [image["src"] for image in shown.all("img")] == [data_uri(png())]
    assert read(facts(evaluation=known)).all("img") == []


def test_every_picture_and_chart_has_words() -> None:
    html = read(facts())
    assert all(len(str(image["alt"])) > 10 for image in html.all("img"))
    drawings = [svg for svg in html.all("svg") if svg.get("role") == "img"]
    assert len(drawings) == len(html.all("figure")) + 1
    assert all(len(str(svg["aria-label"])) > 20 for svg in drawings)


def test_what_is_read_aloud_makes_sense() -> None:
    html = read(facts())
    assert html.all("html") == [{"lang": "en"}]
    assert len(html.all("h1")) == len(html.all("main")) == len(html.all("title")) == 1
    assert all(cell.get("scope") in ("col", "row") for cell in html.all("th"))
    assert len(html.all("caption")) == len(html.all("table"))
    ids = {str(attrs["id"]) for _, attrs in html.tags if attrs.get("id")}
    named = {str(a["aria-labelledby"]) for _, a in html.tags if a.get("aria-labelledby")}
    links = {str(a["href"])[1:] for a in html.all("a")}
    assert named | links <= ids


def test_many_classes_are_told_by_what_is_confused_most() -> None:
    names = tuple(f"class {n}" for n in range(MOST_MATRIX + 80))
    made = build_page(facts(evaluation=evaluation(names)))
    assert made.matrix == ()
    assert [(p.truth, p.predicted, p.count) for p in made.pairs] == [("class 0", "class 1", "2")]
    assert "A matrix of 100 classes would be unreadable" in made.pairs_note
    assert len(made.classes) == 100


def test_confusions_are_counted_where_they_are_not_all_shown() -> None:
    size = 8
    rows = tuple(tuple(1 for _ in range(size)) for _ in range(size))
    found = evaluation(tuple("abcdefgh"), confusion=rows, items=64, accuracy=8 / 64, worst=())
    made = build_page(facts(evaluation=found))
    assert len(made.pairs) == MOST_PAIRS
    assert made.pairs_note == f"{56 - MOST_PAIRS}\u00a0rarer confusions not shown."
    assert made.mistakes_note == "56\u00a0items wrong; no examples were saved."


def test_a_matrix_shows_counts_and_shares() -> None:
    first = build_page(facts()).matrix[0]
    cells = [(cell.count, cell.share.replace("\u00a0", " "), cell.right) for cell in first.cells]
    assert cells == [("8", "80%", True), ("2", "20%", False)]
    assert first.items == "10"


def luminance(colour: str) -> float:
    """Of #rrggbb, as WCAG 2.2 defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def palettes() -> dict[str, dict[str, str]]:
    style = (TEMPLATES / "report.css").read_text()
    blocks = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    found = [dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6})", block)) for block in blocks]
    return dict(zip(("light", "dark", "print"), found, strict=True))


@pytest.mark.parametrize("palette", ["light", "dark", "print"])
def test_every_text_has_the_contrast_that_reading_needs(palette: str) -> None:
    colours: dict[str, Any] = palettes()[palette]
    for text in ("ink", "quiet", "accent"):
        for context in ("ground", "raised"):
            light, dark = sorted((luminance(colours[text]), luminance(colours[context])))[::-1]
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, context)


def test_the_same_facts_make_the_same_page() -> None:
    assert render(build_page(facts()), TEMPLATES) == render(build_page(facts()), TEMPLATES)
    assert str(BEGAN) not in render(build_page(facts()), TEMPLATES)
