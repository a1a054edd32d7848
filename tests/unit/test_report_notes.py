"""The student's own text in a report: Markdown as it should be, and hostile Markdown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_facts import data_uri, facts, png

from labctl.insight.report import notes as report_notes
from labctl.insight.report.notes import read_notes, render_notes
from labctl.insight.report.page import build_page
from labctl.insight.report.render import render

ROOT = Path(__file__).parents[2]
PICTURE = data_uri(png())


def show(text: str) -> str:
    return "".join(
        part.title + part.html for part in render_notes(text, lambda source: (PICTURE, ""))
    )


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    root = tmp_path / "lab"
    (root / "runs" / "first").mkdir(parents=True)
    return root


def read(root: Path) -> tuple[str, list[str]]:
    problems: list[str] = []
    parts = read_notes(root, root / "runs" / "first", problems)
    return "".join(part.html for part in parts), problems


def test_markdown_is_shown_by_sections() -> None:
    text = "Before.\n\n# Idea *here*\n\n- one\n- **two**\n\n### Detail\n\n"
    text += "## Result\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"
    first, idea, result = render_notes(text, lambda source: ("", "none"))
    assert (first.title, first.html) == ("", "<p>Before.</p>\n")
    assert idea.title == "Idea here"
    assert "<strong>two</strong>" in idea.html
    assert "<h5>Detail</h5>" in idea.html
    assert "<td>1</td>" in result.html
    page = render(build_page(facts(text=(first, idea, result))), ROOT / "templates" / "report")
    assert "<h3>Idea here</h3>" in page


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "[x](javascript:alert(1))",
        "[x](JaVaScRiPt&colon;alert(1))",
        "[x](&#106;avascript:alert(1))",
        "[x](data:text/html;base64,PHNjcmlwdD4=)",
        "[x](file:///etc/passwd)",
        "[x](vbscript:x)",
        "<javascript:alert(1)>",
        "# <svg/onload=alert(1)>",
        '[x](https://a "\\" onclick=alert(1) x=\\"")',
        '![\\" onerror=alert(1) x=\\"](a.png)',
        "```\n</code><script>alert(1)</script>\n```",
        "[a]: javascript:alert(1)\n\n[a]",
    ],
)
def test_hostile_markdown_is_only_text(text: str) -> None:
    page = render(
        build_page(facts(text=render_notes(text, lambda source: (PICTURE, "")))),
        ROOT / "templates" / "report",
    )
    tags = re.findall(r"<[a-z][^>]*>", page[page.index('id="notes"') : page.index('id="curves"')])
    for tag in tags:
        assert not re.search(r"<(script|svg|iframe|object|style|form)|\son\w+=(?![^\"]*\")", tag), (
            tag
        )
        assert not re.search(r"(href|src)=\"(?!https?:|mailto:|data:image/(png|jpeg);base64,)", tag)
    outside = [re.sub(r'"[^"]*"', '""', tag) for tag in tags]
    assert not any(re.search(r"\bon\w+=", tag) for tag in outside)


@given(st.text(alphabet="<>\"'&()[]!#*_`-:/ \nabjs\u202e\x00", max_size=80))
def test_no_text_becomes_a_script_or_a_handler(text: str) -> None:
    shown = show(text)
    for tag in re.findall(r"<[^>]*>", shown):
        assert re.match(
            r"</?(p|h\d|em|strong|a|img|ul|ol|li|code|pre|blockquote|hr|br|t\w+)\b", tag
        )
    assert "\u202e" not in shown


def test_a_link_to_the_web_stays_and_one_to_a_file_does_not() -> None:
    assert 'href="https://example.org/a"' in show("[x](https://example.org/a)")
    assert "href" not in show("[x](runs/secret.html)")


def test_pictures_come_from_below_the_lab_alone(lab: Path, tmp_path: Path) -> None:
    (lab / "figures").mkdir()
    (lab / "figures" / "one plot.png").write_bytes(png())
    (tmp_path / "outside.png").write_bytes(png())
    (lab / "link.png").symlink_to(tmp_path / "outside.png")
    (lab / "text.png").write_text("no picture")
    (lab / "wide.png").write_bytes(png(60_000, 60_000))
    text = """
![fine](figures/one%20plot.png) ![up](../outside.png) ![link](link.png) ![text](text.png)
![wide](wide.png) ![gone](gone.png) ![web](https://example.org/a.png) ![root](/etc/passwd)
![folder](figures) ![nul](%00.png)
"""
    (lab / "notes.md").write_text(text)
    html, problems = read(lab)
    assert html.count("<img ") == 1
    assert 'alt="fine"' in html
    assert len(problems) == 9
    for part in (
        "../outside.png is not shown: it is not below the lab",
        "link.png is not shown: it is not below the lab",
        "wide.png is not shown: it has 60,000 x 60,000 pixels",
        "gone.png is not shown: there is no such file",
        "https://example.org/a.png is not shown: it is not a file of this lab",
        "/etc/passwd is not shown: it is not below the lab",
    ):
        assert any(part in problem for problem in problems), part


def test_many_and_large_pictures_and_long_texts_end(
    lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (lab / "a.png").write_bytes(png())
    (lab / "notes.md").write_text("![a](a.png) " * 40)
    html, problems = read(lab)
    assert html.count("<img ") == report_notes.MOST_PICTURES
    assert "at most 30" in problems[0]
    monkeypatch.setattr(report_notes, "LARGEST_PICTURE_BYTES", 10)
    assert "larger than" in read(lab)[1][0]
    (lab / "notes.md").write_text("> " * 150_000)
    _, problems = read(lab)
    assert problems == ["notes.md: only its first 200,000 characters are shown"]


def test_the_run_s_own_notes_come_first_and_a_link_out_is_skipped(
    lab: Path, tmp_path: Path
) -> None:
    assert read(lab) == ("", [])
    (lab / "notes.md").write_text("of the lab")
    assert "of the lab" in read(lab)[0]
    (lab / "runs" / "first" / "notes.md").write_text("of the run")
    assert "of the run" in read(lab)[0]
    (lab / "runs" / "first" / "notes.md").unlink()
    (tmp_path / "secret.txt").write_text("secret")
    (lab / "runs" / "first" / "notes.md").symlink_to(tmp_path / "secret.txt")
    html, problems = read(lab)
    assert (html, problems) == ("", ["skipped notes.md: it is a link that leads out of the lab"])
