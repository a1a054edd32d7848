"""The lists of submissions: which one counts, what was too late, and the receipts."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from dashboard_bed import Bed, Visitor, make
from marking_bed import FILES, hand_in_files

from labctl.web.pages import Pages
from labctl.web.pseudonyms import Pseudonyms
from labctl.web.snapshot import SnapshotTaker

HOUR_S = 3600


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    made = make(tmp_path)
    hand_in_files(made, "lovelace", FILES)
    hand_in_files(made, "lovelace", FILES, number=2, late_s=2 * HOUR_S)
    hand_in_files(made, "lovelace", FILES, number=3, late_s=50 * HOUR_S)
    yield made
    made.state.close()


def draw_rows(bed: Bed) -> dict[str, str]:
    """The rows of the seat's list, by the number of the submission."""
    pages = Pages(bed.paths.data_dir / "templates" / "dashboard")
    snapshot = SnapshotTaker(bed.folder, bed.state).take()
    html = pages.seat(bed.seat(0).pseudonym, Pseudonyms())(snapshot)["handed"]
    html = html.replace("\N{NO-BREAK SPACE}", " ")
    rows = [row for row in html.split("<tr>") if 'data-label="No."' in row]
    return {row.partition('"No.">')[2][0]: row for row in rows}


def test_the_last_one_in_time_counts(bed: Bed) -> None:
    rows = draw_rows(bed)
    assert [number for number, row in rows.items() if "<small>counts</small>" in row] == ["2"]
    assert "2 h late, 10% off" in rows["2"]
    assert "too late" in rows["3"]
    assert "% off" not in rows["3"]


def test_staff_gets_the_receipt(bed: Bed) -> None:
    stop = threading.Event()
    visitor = Visitor(bed.start(stop))
    visitor.enter()
    key = bed.seat(0).pseudonym
    status, headers, body = visitor.ask(f"/seats/{key}/handed/{key}/hw3/2/receipt")
    assert status == 200
    assert headers["content-disposition"] == f'attachment; filename="hw3-{key}-2.receipt.json"'
    receipt = json.loads(body)["receipt"]
    assert (receipt["student"], receipt["number"]) == ("lovelace", 2)
    for path in (f"{key}/hw3/9", f"{key}/hw4/1", f"{bed.seat(1).pseudonym}/hw3/1"):
        assert visitor.ask(f"/seats/{key}/handed/{path}/receipt")[0] == 404
    stop.set()
