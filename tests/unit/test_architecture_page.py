"""What docs/architecture.md names is there, under the path as written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
# Everything else that the page names is below labctl/.
OTHER_FOLDERS = ("benchmarks/", "docs/", "scripts/", "tests/")
PATH = re.compile(r"`([\w/.*-]+(?:/|\.py|\.sh))`")
IN_FILE = re.compile(r"`([\w.]+)`\s+(?:\(|in\s+)`([\w/]+\.py)`")


def find(name: str) -> list[Path]:
    return list((ROOT if name.startswith(OTHER_FOLDERS) else ROOT / "labctl").glob(name))


def walks() -> Iterator[tuple[str, list[str]]]:
    for section in PAGE.split("\n## ")[1:]:
        title, *lines = section.splitlines()
        if title.startswith("`labctl"):
            yield title, lines


def test_every_path_opens_as_written() -> None:
    names = PATH.findall(PAGE)
    assert len(names) > 150
    missing = {name for name in names if not find(name)}
    # The package itself, and a directory of every lab.
    assert missing == {"labctl/", ".labctl/"}


def test_every_function_is_in_the_file_that_is_named_beside_it() -> None:
    pairs = IN_FILE.findall(PAGE)
    assert len(pairs) > 10
    for function, file in pairs:
        source = (ROOT / "labctl" / file).read_text()
        for name in function.split("."):
            assert re.search(rf"\b(def|class) {name}\b", source), (function, file)


def test_every_walk_fits_on_one_screen() -> None:
    titles = []
    for title, lines in walks():
        titles.append(title)
        assert len(lines) <= 40, title
        assert max(map(len, lines)) <= 110, title
    assert len(titles) == 4
