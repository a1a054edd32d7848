"""The first page after a start waits for nothing that could be done before."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest
from service_proxy_bed import serve_bed

from labctl.web import factory
from labctl.web.pages import CompiledTemplates, Pages
from labctl.web.snapshot import SnapshotTaker

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from dashboard_bed import Bed, Visitor, fill, make


@pytest.fixture
def bed(tmp_path: Path) -> Bed:
    return fill(make(tmp_path))


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What pages must not wait for, as it is done."""
    done: list[str] = []

    def count(owner: type, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def counted(*words: Any, **named: Any) -> Any:
            done.append(name)
            return original(*words, **named)

        monkeypatch.setattr(owner, name, counted)

    count(SnapshotTaker, "take")
    count(jinja2.Environment, "compile")
    monkeypatch.setattr("labctl.web.pages._COMPILED", CompiledTemplates())
    monkeypatch.setattr(factory, "EVERY_S", 600.0)
    return done


def test_the_dashboards_first_pages_are_drawn_before_it_answers(bed: Bed, work: list[str]) -> None:
    stop = threading.Event()
    visitor = Visitor(bed.start(stop))
    assert {"take", "compile"} <= set(work), "the counters count"
    work.clear()
    visitor.enter()
    for path in ("/", "/costs", "/regrades", "/assignments/hw3", f"/seats/{bed.seat(0).pseudonym}"):
        assert visitor.ask(path)[0] == 200
    assert work == []
    stop.set()


def test_the_first_student_waits_no_longer_than_others(bed: Bed, work: list[str]) -> None:
    with serve_bed(bed) as campus:
        work.clear()
        visitor = campus.enter("lovelace")
        status, _, page = visitor.ask("/")
        assert (status, "Submit from my server" in page) == (200, True)
        assert work == ["take"]


def test_two_sites_of_a_process_compile_templates_once(bed: Bed, work: list[str]) -> None:
    folder = bed.paths.data_dir / "templates" / "dashboard"
    Pages(folder)
    assert work
    work.clear()
    Pages(folder)
    assert work == []
