"""`labctl docs`: the pages come with labctl, and each page that a message names is one of them."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from terminal import open_terminal
from transcripts import make_program

from labctl.cli.docs import _render

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"labctl docs ([a-z][\w.-]*[a-z])")


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path), "PATH": f"{make_program(tmp_path)}:/usr/bin:/bin"}


def run_docs(environ: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["labctl", "docs", *words], env=environ, capture_output=True, text=True, check=False
    )


def test_it_lists_every_page_with_its_title(environ: dict[str, str]) -> None:
    rows = run_docs(environ).stdout.splitlines()
    files = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("*.yaml")]
    assert len(rows) == len(files) + 1
    assert "student            Student guide" in rows
    assert "lab.yaml           Every key of lab.yaml with an example value" in rows


@pytest.mark.parametrize("name", ["errors", "errors.md", "docs/errors.md", "errors.md#exit-codes"])
def test_a_pipe_gets_the_page_without_notes_for_programs(
    environ: dict[str, str], name: str
) -> None:
    lines = (ROOT / "docs" / "errors.md").read_text().splitlines()
    assert any(line.startswith("<!--") for line in lines)
    expected = [line for line in lines if not line.startswith("<!--")]
    assert run_docs(environ, name).stdout.splitlines() == expected


def test_an_unknown_page_is_not_found_and_the_nearest_is_named(environ: dict[str, str]) -> None:
    done = run_docs(environ, "studnt")
    assert done.returncode == 4
    assert "did you mean student?" in done.stderr
    assert "next: labctl docs student" in done.stderr


@pytest.mark.parametrize("name", ["../README", "/etc/passwd", "..", "site.css", ""])
def test_a_name_never_leads_out_of_the_pages(environ: dict[str, str], name: str) -> None:
    done = run_docs(environ, name)
    assert (done.returncode == 4) != (name == "")


@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal_shows_a_page_in_the_pager(environ: dict[str, str], columns: int) -> None:
    page = Path(environ["HOME"]) / "page"
    environ["PAGER"] = f"tee {page}"
    with open_terminal(Path(environ["HOME"]), environ, columns) as terminal:
        shown = terminal.run("labctl docs student", [], 60.0)
    assert "\x1b" not in page.read_text(), "not every pager passes colors on"
    assert "Student guide" in shown
    assert "labctl up" in shown
    assert "<!--" not in shown
    assert "](" not in shown
    code = {line.strip() for line in (ROOT / "docs" / "student.md").read_text().splitlines()}
    wide = {line.strip() for line in shown.splitlines() if len(line.rstrip()) > columns}
    assert wide <= code, "only lines of code are wider, so that they can be copied"


def test_lines_of_code_are_whole_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a user can copy a command from any page."""
    monkeypatch.setenv("COLUMNS", "80")
    broken = []
    for file in sorted((ROOT / "docs").glob("*.md")):
        blocks = re.findall(r"^( *)```.*\n((?:.*\n)*?) *```$", file.read_text(), re.MULTILINE)
        page = "".join(
            f"{'1. A list:' if indent else 'No list:'}\n\n{indent}```\n{code}{indent}```\n\n"
            for indent, code in blocks
        )
        shown = {line.strip() for line in _render(page).splitlines()}
        lines = [line.strip() for _, code in blocks for line in code.splitlines()]
        broken += [f"{file.name}: {line}" for line in lines if line not in shown]
    assert broken == []


def list_texts() -> Iterator[tuple[str, str]]:
    """List the strings, but no docstrings, of the code that names pages, with their places."""
    for file in sorted((ROOT / "labctl").rglob("*.py")):
        source = file.read_text()
        if not NAMED.search(source):
            continue
        tree = ast.parse(source)
        bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Constant) or id(node) in bare:
                continue
            if isinstance(node.value, str):
                yield f"{file.relative_to(ROOT)}:{node.lineno}", node.value


def test_messages_name_pages_by_the_command_that_shows_them() -> None:
    """Somebody who installed labctl has no directory docs/."""
    pages = {file.stem for file in (ROOT / "docs").glob("*.md")} | {"lab.yaml", "course.yaml"}
    texts = list(list_texts())
    named = [(place, name) for place, text in texts for name in NAMED.findall(text)]
    assert len(named) > 8
    assert [one for one in named if one[1] not in pages] == []
    files = re.compile(r"(?<![\w./])docs/[a-z-]+\.(?:md|yaml)")
    assert [place for place, text in texts if files.search(text)] == []
