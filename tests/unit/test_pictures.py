"""The pictures of the documentation can be made, and show what they should."""

from __future__ import annotations

import re
import sys
from html import unescape
from pathlib import Path

import pytest

pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
PNG = b"\x89PNG"


def read_svg(path: Path) -> str:
    """Return the text of a picture, with plain spaces."""
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())
    return unescape(" ".join(texts)).replace("\xa0", " ")


def test_every_screen_and_page_has_a_picture(tmp_path: Path) -> None:
    from pictures import make_pictures

    pictures = {picture.file: picture for picture in make_pictures(tmp_path)}
    assert {path.name for path in tmp_path.iterdir()} == set(pictures)
    assert "run slow: done after 10 min" in read_svg(tmp_path / "explain.svg")
    assert "see its card" in read_svg(tmp_path / "top.svg")
    pages = [tmp_path / name for name in pictures if name.endswith(".png")]
    assert len(pages) == 5
    contents = {page.read_bytes() for page in pages}
    assert len(contents) == 5
    assert all(content.startswith(PNG) for content in contents)
