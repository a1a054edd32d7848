"""A list of the dashboard narrowed and sorted by its address, also where no script runs."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from dashboard_bed import NAMES, Bed, Stream, Visitor, fill, make, stream_of

from labctl.web import factory
from labctl.web.listing import (
    PERSON_COLUMNS,
    SEAT_COLUMNS,
    ListView,
    collation_key,
    person_sort_keys,
    seat_sort_keys,
)
from labctl.web.pages import HTMX_CONFIG, STATIC

DASHBOARD = Path(__file__).parents[2] / "templates" / "dashboard"
VENDORED = DASHBOARD / "vendored"


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    found = fill(make(tmp_path_factory.mktemp("lists")))
    yield found
    found.state.close()


@pytest.fixture(scope="module")
def visitor(bed: Bed) -> Iterator[Visitor]:
    stop = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(factory, "EVERY_S", 0.1)
        found = Visitor(bed.start(stop))
    found.enter()
    yield found
    stop.set()


def names_in(page: str) -> list[str]:
    return re.findall(r'<a id="a-[0-9a-f]+" [^>]*><bdi>([^<]*)</bdi>', page)


def test_the_board_is_narrowed_and_sorted_by_its_address(bed: Bed, visitor: Visitor) -> None:
    everybody = names_in(visitor.ask("/")[2])
    assert everybody == [*NAMES[:-2], "owls"]
    assert names_in(visitor.ask("/?show=idle")[2]) == ["Alan Turing", "Frances Allen"]
    by_name = names_in(visitor.ask("/?sort=name")[2])
    assert by_name == sorted(everybody, key=str.casefold)
    assert names_in(visitor.ask("/?sort=-name")[2]) == by_name[::-1]
    # The two who are expensive first; what is equal stays in the roster's order.
    costly = names_in(visitor.ask("/?sort=-cost")[2])
    assert costly[:4] == ["Grace Hopper", "Ken Thompson", "Ada Lovelace", "Alan Turing"]
    assert costly[-1] == "owls"
    working = names_in(visitor.ask("/?show=running&sort=-gpu")[2])
    assert working == ["Ada Lovelace", "Grace Hopper", "Edsger Dijkstra", "Donald Knuth",
                       "Ken Thompson"]  # fmt: skip


def test_an_assignment_is_narrowed_and_sorted_by_its_address(bed: Bed, visitor: Visitor) -> None:
    path = "/assignments/hw3"
    assert names_in(visitor.ask(f"{path}?show=missing")[2]) == [
        "Grace Hopper", "Donald Knuth"]  # fmt: skip
    late = names_in(visitor.ask(f"{path}?show=late&sort=-late")[2])
    assert late == ["Edsger Dijkstra", "Ken Thompson"]
    best = names_in(visitor.ask(f"{path}?sort=-score")[2])
    assert best[:3] == ["Ada Lovelace", "Edsger Dijkstra", "Frances Allen"]


def test_who_submitted_nothing_is_missing_once_their_own_due_time_has_passed(
    tmp_path: Path,
) -> None:
    late = make(tmp_path, due_in_s=-3600)
    file = late.folder.path / "course.yaml"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if "hw4" not in line))
    late.folder.refresh()
    late.folder.ledger.append("due", seat="hopper", by="ann", assignment="hw3", seconds=86_400)
    stop = threading.Event()
    try:
        visitor = Visitor(late.start(stop))
        visitor.enter()
        board, page = visitor.ask("/")[2], visitor.ask("/assignments/hw3")[2]
    finally:
        stop.set()
    assert (page.count(">missing<"), page.count(">not yet<")) == (9, 1)
    assert (board.count(">missing<"), board.count(">not yet<")) == (8, 1)
    late.state.close()


def test_each_link_leads_on_from_what_is_shown(visitor: Visitor) -> None:
    page = visitor.ask("/?show=idle&sort=-cost")[2]
    links = dict(re.findall(r'id="((?:by|show)-[a-z]+)" href="([^"]*)"', page))
    assert links["show-up"] == "?show=up&amp;sort=-cost"
    assert links["show-all"] == "?sort=-cost"
    assert links["by-cost"] == "?show=idle&amp;sort=cost"
    assert links["by-name"] == "?show=idle&amp;sort=name"
    assert 'aria-sort="descending"' in page
    assert re.search(r'id="show-idle"[^>]* aria-current="true"', page)
    view = ListView()
    seen = [(view := view.toggle("cost")).sort for _ in range(3)]
    assert seen == ["-cost", "cost", ""]


def test_every_column_that_an_address_may_name_can_be_sorted_by() -> None:
    assert seat_sort_keys(lambda seat: seat.name).keys() == set(SEAT_COLUMNS)
    assert person_sort_keys("hw3", lambda person: person.name).keys() == set(PERSON_COLUMNS)


@pytest.mark.parametrize("query", ["show=nobody", "sort=secret", "sort=--cost", "show=%00&sort=-"])
def test_what_is_no_mark_or_column_changes_nothing(visitor: Visitor, query: str) -> None:
    page = visitor.ask(f"/?{query}")[2]
    assert names_in(page) == [*NAMES[:-2], "owls"]
    assert "since=" in stream_of(page)
    assert "show=&sort=&" in stream_of(page)


def test_a_watcher_of_a_narrowed_list_is_sent_what_it_shows(bed: Bed, visitor: Visitor) -> None:
    address = stream_of(visitor.ask("/?show=trouble")[2])
    liskov, owls = bed.seat(4), bed.seat(8)
    with Stream(visitor, address) as stream:
        bed.folder.ledger.append("refused", seat=liskov.name, why="no machine is left")
        assert stream.update().keys() == {"reload"}  # one more is shown
    page = visitor.ask("/?show=trouble")[2]
    assert "Barbara Liskov" in names_in(page)
    assert owls.pseudonym not in page
    with Stream(visitor, stream_of(page)) as stream:
        bed.folder.ledger.append("refused", seat=liskov.name, why="still no machine")
        assert stream.update().keys() == {f"s-{liskov.pseudonym}"}


def test_accents_and_capitals_do_not_move_a_name() -> None:
    assert sorted(["Zoe", "émile", "Eva", "Ärmel"], key=collation_key) == [
        "Ärmel",
        "émile",
        "Eva",
        "Zoe",
    ]


def test_every_vendored_script_is_as_it_was_released() -> None:
    recorded = json.loads((VENDORED / "vendored.json").read_text())
    files = {}
    for package, versions in recorded.items():
        ((_, hashes),) = versions.items()
        assert f"{package}.LICENSE" in hashes
        files |= hashes
    assert files.keys() | {"vendored.json"} == {one.name for one in VENDORED.iterdir()}
    for name, digest in files.items():
        assert hashlib.sha256((VENDORED / name).read_bytes()).hexdigest() == digest, name
    assert {Path(name).name for name in STATIC if "vendored" in name} == {
        name for name in files if name.endswith((".js", ".css"))
    }
    (version,) = recorded["htmx.org"]
    assert f'version:"{version}"' in (VENDORED / "htmx.min.js").read_text()


def test_a_page_needs_no_script_or_style_but_files_of_its_own(bed: Bed, visitor: Visitor) -> None:
    """The policy forbids the rest, and htmx is told to do without."""
    assert not HTMX_CONFIG["allowEval"]
    assert not HTMX_CONFIG["allowScriptTags"]
    assert not HTMX_CONFIG["includeIndicatorStyles"]
    for path in ("/", "/costs", "/assignments/hw3", f"/seats/{bed.seat(0).pseudonym}", "/another"):
        page = visitor.ask(path)[2]
        scripts = re.findall(r"<script([^>]*)>(.*?)</script>", page, re.DOTALL)
        assert [body for _, body in scripts] == ["", "", ""]
        for attributes, _ in scripts:
            source = re.fullmatch(r' src="(/static/[0-9a-f]{12}/[a-z.]+\.js)" defer', attributes)
            assert source is not None
            assert visitor.ask(source[1])[1]["content-type"].startswith("text/javascript")
        assert not re.search(r"<style|<[^>]* (style|on[a-z]+|hx-on[^=]*|hx-vars|hx-vals)=", page)
