"""Errors of code that serves labs and courses: each names what its reader can type."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from botocore.exceptions import ClientError

from labctl.commands import ansible
from labctl.errors import LabError
from labctl.errors.subject import Subject
from labctl.events import SilentReporter
from labctl.model import Endpoint, GpuNeed, Need, Offer, Server
from labctl.providers.aws import fit
from labctl.providers.aws.launch import make_launch_error
from labctl.providers.local import LocalProvider
from labctl.servers import prepare
from labctl.servers.agent import require_success
from labctl.servers.connections import Connections
from labctl.sync.push import _Push, push_tree
from labctl.wire.files import PlanReply

ALICE = Subject("seat", "alice")
FULL = PlanReply(("a",), (), 0, (), (), (), short_bytes=1, free_bytes=0, staging="/s")
NEED = Need(gpu=GpuNeed(kind="any", count=1))


def caught(action: Callable[[], object]) -> LabError:
    with pytest.raises(LabError) as raised:
        action()
    return raised.value


def aws(code: str) -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": "no"}}, "RunInstances")


def full_disk() -> LabError:
    remote = Mock(call=Mock(return_value=FULL))
    return caught(lambda: push_tree(remote, "digits", "1", "code", Path("/"), [], SilentReporter()))


def failed_write() -> LabError:
    push = object.__new__(_Push)
    push.files, push.complaint = (), "disk"
    push._request_plan = Mock(return_value=FULL)  # type: ignore[method-assign]
    return push._make_disk_error()


def agent_hint(hint: str) -> LabError:
    reply = {"error": {"kind": "link", "what": "no address", "why": "", "hint": hint}}
    return caught(lambda: require_success("fetch", reply, 1, ""))


def taken_alias() -> LabError:
    connections = Connections(Path("/nowhere"), None)
    connections.is_alias_free = Mock(return_value=False)  # type: ignore[method-assign]
    server = Server(
        id="i-1", lab="digits", lab_id="1", provider="aws", alias="digits",
        endpoint=Endpoint(host="192.0.2.1"), state="running", created_at=0.0,
        offer=Offer(provider="aws", type="small"),
    )  # fmt: skip
    return caught(lambda: connections.write(server))


ERRORS: dict[str, tuple[Callable[[], LabError], str, str]] = {
    "full disk": (
        full_disk,
        "labctl ssh -- df -h  (nothing was sent)",
        "labctl course ssh alice -- df -h  (nothing was sent)",
    ),
    "failed write": (
        failed_write,
        "labctl ssh -- df -h, then labctl push  (transferred data is kept and reused)",
        "labctl course ssh alice -- df -h, then labctl course up --only alice  "
        "(transferred data is kept and reused)",
    ),
    "agent": (
        lambda: agent_hint("check the address; labctl ssh -- getent hosts x.org"),
        "check the address; labctl ssh -- getent hosts x.org",
        "check the address; labctl course ssh alice -- getent hosts x.org",
    ),
    "AWS, no offer": (
        lambda: caught(lambda: fit.offers(NEED, [], fit.AwsConditions())),
        "labctl offers --gpu any   # without the condition that rules out most",
        "labctl course up --only alice",
    ),
    "AWS, full": (
        lambda: make_launch_error(
            aws("InsufficientInstanceCapacity"), Offer(provider="aws", type="small")
        ),
        "labctl offers",
        "labctl course up --only alice",
    ),
    "local, no GPU": (
        lambda: caught(lambda: LocalProvider.offers(Mock(), NEED)),
        "labctl up --gpu auto, or --provider static with this machine as a host",
        "change `gpu:` under `server:` in course.yaml",
    ),
    "alias": (
        taken_alias,
        "give the lab another name: `lab:` in lab.yaml",
        "give the lab another name: `lab:` in course.yaml",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_hint_is_for_a_lab_or_for_the_seat_of_a_course(name: str) -> None:
    make, lab, seat = ERRORS[name]
    error = make()
    assert error.hint == lab
    error.subject = ALICE
    assert error.hint == seat


def test_a_playbook_that_fails_names_the_seat_and_not_its_pseudonym(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "_run", lambda *_: 2)
    host = ansible.Host(alias="ml-8a41", ssh_config=tmp_path / "config", user="student")
    with pytest.raises(LabError, match="could not prepare alice"):
        prepare.run_playbook(host, tmp_path, SilentReporter(), server_name="alice")
    with pytest.raises(LabError, match="could not prepare ml-8a41"):
        prepare.run_playbook(host, tmp_path, SilentReporter())
