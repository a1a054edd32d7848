"""Kept disks: on record with their price until they are known to be gone, and near their server."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from lab_world import LAB_ID, Cloud, Recorded, World, world

from labctl.errors import (
    BusyError,
    NotFoundError,
    PolicyError,
    ProviderError,
    TransferError,
    UnreachableError,
)
from labctl.lifecycle import disk_restore, up
from labctl.lifecycle.down import down
from labctl.lifecycle.status import read_status
from labctl.model import Need, Offer, Resource
from labctl.runs.saved_copies import pull_from_keeper
from labctl.servers import cost, disks, kept_disks
from labctl.servers import leftovers as orphans
from labctl.servers.context import LabContext
from labctl.state.disks import RESTORED, has_expired, list_kept_disks
from labctl.wire.files import RESTORE_DISK, RestoreDiskReply, RestoreDiskRequest

DISK = Resource(
    provider="cloud",
    kind="volume",
    id="vol-1.north",
    price_usd_per_month=8.0,
    lab="digits",
    lab_id=LAB_ID,
    zone="b",
    expires_at=time.time() + 86_400,
)
OVER = msgspec.structs.replace(DISK, id="vol-2.north", expires_at=1_700_000_000.0)


class KeepCloud(Cloud):
    """One whose disks can outlive their servers, with two zones."""

    can_keep_itself = False
    zones = ("a", "b")

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.attach_errors: list[Exception] = []

    def offers(self, need: Need) -> list[Offer]:
        return [Offer(provider=self.name, type="small", zone=zone) for zone in self.zones]

    def leftovers(self) -> list[Resource]:
        self.calls.append("leftovers")
        return list(self.left)

    def keep_disk(self, server_id: str, expires_at: float) -> list[Resource]:
        return []

    def release_disk(self, server_id: str) -> None:
        self.calls.append("release_disk")

    def attach_kept_disk(self, resource: Resource, server_id: str) -> str:
        if self.attach_errors:
            raise self.attach_errors.pop(0)
        return "/dev/kept"


@pytest.fixture
def lab(tmp_path: Path) -> World:
    lab = world(tmp_path, KeepCloud)
    lab.cloud.left.append(DISK)
    return lab


def on_record(lab: World) -> list[str]:
    return [one.disk.id for one in list_kept_disks(lab.context().state, LAB_ID)]


def refused(lab: World, *errors: Exception) -> Recorded:
    """`up` where the disk cannot be attached."""
    assert isinstance(lab.cloud, KeepCloud)
    lab.cloud.attach_errors = list(errors)
    reporter = Recorded()
    up.up(lab.context(reporter))
    return reporter


def test_a_server_is_made_near_the_disk_and_one_that_cannot_have_it_is_ready(lab: World) -> None:
    reporter = refused(lab, ProviderError("no slot left"))
    [server] = lab.cloud.machines.values()
    assert server.offer.zone == "b"
    assert "vol-1 holds earlier results: trying b first" in reporter.said
    assert "cannot restore the files on vol-1: no slot left" in reporter.said
    assert "the disk is kept: $8.00 a month, kept until" in reporter.said


def test_where_no_offer_is_near_it_says_what_stays(lab: World) -> None:
    assert isinstance(lab.cloud, KeepCloud)
    lab.cloud.zones = ("a", "c")
    reporter = refused(lab, ProviderError("another zone"))
    assert (
        "vol-1 holds earlier results, but no offer is in b\n"
        "  it is not deleted: $8.00 a month" in reporter.said
    )


def test_a_disk_that_is_held_for_a_moment_is_waited_for(
    lab: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_disks, "ATTACH_PAUSE_S", 0.01)
    reporter = refused(lab, BusyError("in use"), BusyError("in use"), ProviderError("gone"))
    assert "cannot restore the files on vol-1: gone" in reporter.said


class CopyingAgent:
    """The agent on a server, as far as a disk is copied."""

    def call(self, verb: object, request: RestoreDiskRequest, **_: object) -> RestoreDiskReply:
        assert (verb, request) == (RESTORE_DISK, RestoreDiskRequest("digits", LAB_ID, "/dev/kept"))
        return RestoreDiskReply(("night",), 3, 10, ("train.py",))


def test_what_a_disk_held_is_copied_once_and_recorded(
    lab: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_restore.runs, "refresh", lambda *_: None)
    monkeypatch.setattr(LabContext, "open_agent", lambda *_: CopyingAgent())
    reporter = Recorded()
    context = lab.context(reporter)
    server = lab.cloud.add("srv", "digits", LAB_ID)
    context.state.save_server(server)
    for _ in range(2):
        disk_restore.restore(context, server)
    text = "restored from vol-1: 1 run with 3 files and 1 edited file\n  next: labctl pull"
    assert reporter.said.count(text) == 1
    [event] = context.state.list_events(kind=RESTORED)
    assert event.detail == {
        "disk": msgspec.to_builtins(DISK),
        "runs": ["night"],
        "files": 3,
        "bytes": 10,
        "edits": ["train.py"],
    }


def test_a_lab_of_a_group_asks_only_once_it_had_a_server(lab: World) -> None:
    context = msgspec.structs.replace(lab.context(), group="course")
    context.__dict__["provider"] = lab.cloud
    assert [
        one.zone for one in kept_disks.sort_by_kept_disks(context, lab.cloud.offers(Need()))
    ] == ["a", "b"]
    assert lab.cloud.calls == []
    context.state.record("ready", lab_id=LAB_ID, server_id="earlier")
    assert [
        one.zone for one in kept_disks.sort_by_kept_disks(context, lab.cloud.offers(Need()))
    ] == ["b", "a"]
    assert lab.cloud.calls == ["leftovers"]


@pytest.mark.parametrize("command", ["status", "orphans", "down"])
def test_whoever_sees_it_puts_its_price_on_record(lab: World, command: str) -> None:
    if command == "status":
        read_status(lab.context(), refresh=True)
    elif command == "orphans":
        orphans.find_orphans(lab.context())
    else:
        assert down(lab.context(), discard=False).leftovers == (DISK,)
    [one] = cost.compute_costs(lab.context()).kept
    assert one.disk == DISK
    [one] = read_status(lab.context(), refresh=False).kept
    assert disks.describe_kept_disk(one).startswith("kept disk vol-1: $8.00 a month, kept until 20")


def test_one_that_is_not_shown_any_more_is_gone_only_once_every_region_was_asked(
    lab: World,
) -> None:
    read_status(lab.context(), refresh=True)
    lab.cloud.left.clear()
    read_status(lab.context(), refresh=True)
    [one] = list_kept_disks(lab.context().state)
    assert disks.describe_kept_disk(one).endswith("no longer listed by cloud")
    lab.cloud.left.append(DISK)
    read_status(lab.context(), refresh=True)
    [one] = list_kept_disks(lab.context().state)
    assert one.missed_at is None
    lab.cloud.left.clear()
    everywhere = msgspec.structs.replace(lab.context(), everywhere=True)
    everywhere.__dict__["provider"] = lab.cloud
    orphans.find_orphans(everywhere)
    assert on_record(lab) == []


def test_orphans_removes_those_whose_time_is_over_and_others_only_when_told(lab: World) -> None:
    lab.cloud.left.append(OVER)
    context = lab.context()
    left = orphans.end_orphans(context, orphans.find_orphans(context), kept_too=False)
    assert left.resources == (DISK,)
    assert left.is_billing
    assert on_record(lab) == [DISK.id]
    left = orphans.end_orphans(context, orphans.find_orphans(context), kept_too=True)
    assert left.resources == ()
    assert on_record(lab) == []


def test_down_ends_the_disk_only_once_all_that_came_from_it_is_home(lab: World) -> None:
    refused(lab, ProviderError("another zone"))
    assert down(lab.context(), discard=False).leftovers == (DISK,)
    refused(lab, ProviderError("another zone"))
    [server] = lab.cloud.machines.values()
    detail = {"disk": msgspec.to_builtins(DISK)}
    lab.context().state.record(RESTORED, lab_id=LAB_ID, server_id=server.id, detail=detail)
    assert down(lab.context(), discard=False).leftovers == ()
    assert on_record(lab) == []


@pytest.mark.parametrize("is_reachable", [True, False])
def test_a_disk_whose_home_is_not_saved_outlives_the_next_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_reachable: bool
) -> None:
    """`labctl up` restores results from a kept disk, and nothing of the home directory.

    That directory is too large to download unasked, or the server cannot be reached to list it.
    """
    monkeypatch.setattr("labctl.lifecycle.home_files.LARGEST_UNASKED_BYTES", 3)
    lab = world(tmp_path, KeepCloud)
    up.up(lab.context())
    (lab.machine.home / "notes.txt").write_text("by hand")
    if not is_reachable:
        lab.machine.error = UnreachableError("the server does not answer")

    def keep(cloud: KeepCloud, server_id: str, expires_at: float) -> list[Resource]:
        cloud.left.append(DISK)
        return [DISK]

    monkeypatch.setattr(KeepCloud, "keep_disk", keep)
    with pytest.raises(PolicyError) as caught:
        down(lab.context(Recorded(answers=[True, False])), discard=False)
    assert lab.cloud.machines == {}
    assert "the server was terminated and its disk kept for 30 days" in caught.value.why
    assert "mount the kept disk and copy the files of the home" in caught.value.hint
    (lab.machine.home / "notes.txt").unlink()
    lab.machine.error = None
    refused(lab, ProviderError("another zone"))
    [server] = lab.cloud.machines.values()
    detail = {"disk": msgspec.to_builtins(DISK)}
    lab.context().state.record(RESTORED, lab_id=LAB_ID, server_id=server.id, detail=detail)
    assert down(lab.context(), discard=False).leftovers == (DISK,)


def test_nothing_to_pull_from_says_where_the_results_are(lab: World) -> None:
    read_status(lab.context(), refresh=True)
    with pytest.raises(NotFoundError) as found:
        lab.context().get_server()
    told = kept_disks.explain_missing_server(lab.context(), found.value)
    assert "its results are on vol-1: $8.00 a month" in told.why
    assert told.hint == "labctl up\nlabctl pull"


def seen_before_its_end(lab: World) -> None:
    """A disk that is on record, whose time is over by now."""
    lab.cloud.left[:] = [DISK, OVER]
    read_status(lab.context(), refresh=True)


def test_the_next_command_removes_a_disk_whose_time_is_over(lab: World) -> None:
    seen_before_its_end(lab)
    reporter = Recorded()
    kept_disks.remove_expired(lab.context(reporter))
    assert lab.cloud.left == [DISK]
    assert on_record(lab) == [DISK.id]
    assert "removed the kept disk vol-2: expired on 2023-11-14" in reporter.said
    lab.cloud.calls.clear()
    kept_disks.remove_expired(lab.context())
    assert lab.cloud.calls == []


@pytest.mark.parametrize("spared", [{"expires_at": time.time() + 86_400}, {"server_id": "srv-1"}])
def test_the_provider_has_the_last_word_about_its_end(lab: World, spared: dict[str, Any]) -> None:
    seen_before_its_end(lab)
    now = msgspec.structs.replace(OVER, **spared)
    lab.cloud.left[:] = [DISK, now]
    kept_disks.remove_expired(lab.context())
    assert lab.cloud.left == [DISK, now]


def test_a_disk_that_is_on_the_present_server_is_not_asked_about(lab: World) -> None:
    refused(lab, ProviderError("another zone"))
    [server] = lab.cloud.machines.values()
    seen_before_its_end(lab)
    detail = {"disk": msgspec.to_builtins(OVER)}
    lab.context().state.record(RESTORED, lab_id=LAB_ID, server_id=server.id, detail=detail)
    assert not has_expired(lab.context().state, LAB_ID, "cloud")


def test_one_that_cannot_be_removed_keeps_no_other(
    lab: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = msgspec.structs.replace(OVER, id="vol-3.north")
    lab.cloud.left[:] = [OVER, other]
    read_status(lab.context(), refresh=True)

    def remove(resource: Resource) -> None:
        if resource.id == OVER.id:
            raise ProviderError("not now")
        lab.cloud.left.remove(resource)

    monkeypatch.setattr(lab.cloud, "remove", remove)
    with pytest.raises(ProviderError, match="not now"):
        kept_disks.remove_expired(lab.context())
    assert on_record(lab) == [OVER.id]


def test_down_takes_expired_disks_along(lab: World) -> None:
    lab.cloud.left.append(OVER)
    reporter = Recorded()
    assert down(lab.context(reporter), discard=False).leftovers == (DISK,)
    assert "removed the kept disk vol-2: expired on" in reporter.said


def test_a_keepers_copy_that_ends_too_early_is_pulled_again(lab: World) -> None:
    with pytest.raises(TransferError, match="not fully received") as raised:
        pull_from_keeper(lab.context(), "night", {}, io.BytesIO(bytes(100)), None)
    assert (raised.value.why, raised.value.hint) == (
        "it is truncated",
        "labctl pull night   # again",
    )
