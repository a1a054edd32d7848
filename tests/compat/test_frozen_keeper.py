"""A lab that was handed over: the parcel on its way, and the keeper that has taken it in."""

from __future__ import annotations

import gzip
import io
from pathlib import Path
from typing import Any

import pytest
from frozen import DIGITS, Frozen, Student
from lab_world import Recorded, Wires

from labctl.config import Paths, find_paths
from labctl.errors import UsageError
from labctl.lifecycle import import_lab as take_in
from labctl.lifecycle import kept_labs, lab_archive
from labctl.servers.context import LabContext
from labctl.state import State, ledgers

NAME = f"digits-{DIGITS}"


class Keeper:
    """A keeper's machine; `context` reaches the student's cloud and server from there."""

    def __init__(self, home: Path, student: Student, monkeypatch: pytest.MonkeyPatch) -> None:
        self.environ = {"HOME": str(home)}
        own = kept_labs.make_context

        def context(*words: Any, **named: Any) -> LabContext:
            found = own(*words, **named)
            found.__dict__["provider"] = student.cloud
            found.__dict__["connections"] = Wires(found.paths, student.machine)
            return found

        monkeypatch.setattr(kept_labs, "make_context", context)

    @property
    def places(self) -> Paths:
        return find_paths(self.environ)

    def take_in(self, data: bytes) -> take_in.ImportedLab:
        with State(self.places.database) as state:
            return take_in.import_lab(
                io.BytesIO(data), self.places, state, self.environ, Recorded(), running=True
            )

    def context(self) -> LabContext:
        one = kept_labs.find_kept_lab(self.places, NAME)
        return kept_labs.make_context(
            one, self.places, State(self.places.database), Recorded(), self.environ
        )


@pytest.fixture
def parcel(frozen: Frozen) -> bytes:
    return gzip.decompress((frozen.source / "parcel.tar.gz").read_bytes())


def read_version(parcel: bytes) -> str:
    return lab_archive.LabExportReader(io.BytesIO(parcel)).parcel.version


def test_a_parcel_of_the_same_version_is_taken_in(
    student: Student, parcel: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (lab_archive, take_in):
        monkeypatch.setattr(module, "labctl_version", lambda: read_version(parcel))
    monkeypatch.setattr(take_in, "admit", lambda *_: None)
    keeper = Keeper(tmp_path / "new-keeper", student, monkeypatch)
    taken = keeper.take_in(parcel)
    assert (taken.name, taken.runs) == (NAME, ("night",))
    check_kept(keeper)


def test_one_of_another_version_is_refused_with_what_to_type(
    student: Student, parcel: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(take_in, "labctl_version", lambda: "99.0")
    keeper = Keeper(tmp_path / "new-keeper", student, monkeypatch)
    with pytest.raises(UsageError) as caught:
        keeper.take_in(parcel)
    assert caught.value.hint == f"pipx install --force labctl=={read_version(parcel)}"
    assert not keeper.places.keep_dir.exists() or not list(keeper.places.keep_dir.glob("digits*"))


def test_a_lab_in_a_keepers_care_stays_there(
    frozen: Frozen, student: Student, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = frozen.unpack("keeper")
    keeper = Keeper(home, student, monkeypatch)
    frozen.restore_database("keeper.state.sql", keeper.places.database)
    check_kept(keeper)


def check_kept(keeper: Keeper) -> None:
    """What a recovery needs is there."""
    (one,) = kept_labs.list_kept_labs(keeper.places)
    assert (one.lab, one.lab_id, one.runs) == ("digits", DIGITS, ("night",))
    assert one.ceiling_usd_per_hour is not None
    context = keeper.context()
    root = kept_labs.lab_directory(keeper.places, NAME)
    assert (root / ".labctl/kept/night/code/train.py").is_file()
    assert (root / ".labctl/kept/night/spec.json").is_file()
    assert context.identity.is_file()
    assert context.get_server().provider == "aws"
    assert [run.id for run in context.state.list_runs(DIGITS)] == ["night"]


def test_two_ledgers_of_before_become_one(frozen: Frozen, student: Student, tmp_path: Path) -> None:
    kept = frozen.restore_database("keeper.state.sql", tmp_path / "kept" / "labctl.db")
    with State(kept) as there, State(student.places.database) as here:
        own, theirs = ledgers.list_lines(here, DIGITS), ledgers.list_lines(there, DIGITS)
        ledgers.import_lines(here, DIGITS, theirs)
        lines = {(one.ledger, one.number): one.kind for one in ledgers.list_lines(here, DIGITS)}
        assert lines == {(one.ledger, one.number): one.kind for one in [*own, *theirs]}
        assert ledgers.import_lines(here, DIGITS, theirs) == 0
