"""The documentation builds as a site, and a dead link stops the build."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml
from chromium import open_browser

from labctl.cli.groups import cli

ROOT = Path(__file__).parents[2]
PHONE_PX = 390


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    words += ["--config-file", str(config), "--site-dir", str(site)]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", site)
    assert done.returncode == 0, done.stderr
    return site


def test_every_page_is_built_and_found_by_the_search(site: Path) -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    missing = {name for name in pages if not (site / name / "index.html").exists()}
    assert missing == set()
    index = (site / "search" / "search_index.json").read_text()
    assert "I closed the laptop" in index
    home = (site / "index.html").read_text()
    assert 'href="student/"' in home


@pytest.mark.long
@pytest.mark.browser
def test_no_page_is_wider_than_a_phone(site: Path) -> None:
    with open_browser() as browser:
        page = browser.new_page(viewport={"width": PHONE_PX, "height": 800})
        widths = {}
        for file in (site / "index.html", *site.glob("*/index.html")):
            page.goto(file.as_uri())
            widths[file.parent.name] = page.evaluate("document.documentElement.scrollWidth")
    assert len(widths) > 20
    assert {name: width for name, width in widths.items() if width > PHONE_PX} == {}


def test_dead_links_and_pages_without_a_menu_stop_the_build(tmp_path: Path) -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    settings |= {"hooks": [], "docs_dir": "docs", "nav": [{"Home": "index.md"}]}
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text("# Home\n\n[page](nowhere.md) [section](#nowhere-else)\n")
    (docs / "other.md").write_text("# Other\n")
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(settings))
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 1
    for words in ("nowhere.md", "#nowhere-else", "other.md"):
        assert words in done.stderr


def list_commands(group: click.Group, words: tuple[str, ...] = ()) -> Iterator[str]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from list_commands(command, (*words, name))
        else:
            yield " ".join((*words, name))


def test_every_command_and_page_has_a_picture_or_a_reason_to_have_none() -> None:
    listed = tomllib.loads((ROOT / "scripts" / "pictures.toml").read_text())
    pages = [path.name for path in (ROOT / "templates" / "dashboard").glob("*.html.j2")]
    for kind, names in (
        ("commands", [*list_commands(cli)]),
        ("pages", [name.removesuffix(".html.j2") for name in pages]),
    ):
        without = [name for group in listed[f"{kind}-without"].values() for name in group]
        assert sorted([*listed[kind], *without]) == sorted(names)
