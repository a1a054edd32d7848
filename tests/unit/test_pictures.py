"""The pictures of the documentation can be made, and show what they should."""

from __future__ import annotations

import re
import sys
import tomllib
from html import unescape
from pathlib import Path

import pytest

pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
PNG = b"\x89PNG"

# Words of screens that come from a simulated cloud, a course, or a part of a command.
SHOWN = {
    "course.svg": "7 of 9 seats have a server",
    "doctor.svg": "server: birds has no server",
    "forward.svg": "jupyter: http://127.0.0.1:",
    "offers.svg": "g4dn.xlarge",
    "plan.svg": "all servers, per hour",
    "run.svg": "310 MiB of 512 MiB",
    "submit.svg": "step-00000080",
    "up.svg": "start g4dn.xlarge in us-east-1",  # prices choose the zone
}


def list_pictures(page: Path) -> list[str]:
    return re.findall(r"<!-- picture: (\S+)", page.read_text())


def read_svg(path: Path) -> str:
    """Return the text of a picture, with plain spaces."""
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())
    return unescape(" ".join(texts)).replace("\xa0", " ")


@pytest.mark.long
def test_every_screen_and_page_has_a_picture(tmp_path: Path) -> None:
    from pictures import make_pictures

    pictures = {picture.file: picture for picture in make_pictures(tmp_path)}
    assert {path.name for path in tmp_path.iterdir()} == set(pictures)
    assert "run slow: done after 10 min" in read_svg(tmp_path / "explain.svg")
    assert "see its card" in read_svg(tmp_path / "top.svg")
    for name, words in SHOWN.items():
        assert words in read_svg(tmp_path / name), name
    shown = [name for page in ROOT.glob("docs/*.md") for name in list_pictures(page)]
    assert shown
    assert set(shown) <= set(pictures)
    listed = tomllib.loads((ROOT / "scripts" / "pictures.toml").read_text())
    assert {*listed["commands"].values(), *listed["pages"].values()} <= set(pictures)
    pages = [tmp_path / name for name in pictures if name.endswith(".png")]
    contents = {page.read_bytes() for page in pages}
    assert len(contents) == len(pages) > 0  # no two show the same page
    assert all(content.startswith(PNG) for content in contents)
