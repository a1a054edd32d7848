"""Errors of code that serves labs and courses: each names what its reader can type."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
from botocore.exceptions import ClientError

from labctl import state
from labctl.agent.files.curl import RESUME
from labctl.agent.mirror.store import ADD_STORE
from labctl.agent.reply import Failure, encode_line, parse_reply
from labctl.commands import ansible
from labctl.errors import LabError, LinkLostError, assign_subject
from labctl.errors.subject import COURSE, LAB, Subject
from labctl.events import SilentReporter
from labctl.lifecycle import disk_restore
from labctl.model import GIB, Endpoint, GpuNeed, Need, Offer, Resource, Server
from labctl.providers import local, static
from labctl.providers.aws import AwsProvider, fit, instances
from labctl.providers.aws.launch_errors import make_launch_error
from labctl.providers.aws.quotas import find_quota
from labctl.providers.local import LocalProvider
from labctl.servers import deadlines, playbooks
from labctl.servers.agent import require_success
from labctl.servers.connections import Connections
from labctl.stores import lab_store
from labctl.sync.push import _Push, push_tree
from labctl.transports.bounded_output import MOST_BYTES, BoundedOutput
from labctl.transports.failures import make_link_lost_error, make_refused_error, make_timeout_error
from labctl.wire.codec import encode
from labctl.wire.files import PlanReply
from labctl.wire.mirrors import PROBE_STORE
from labctl.wire.verbs import STATUS_COMMAND, ErrorMessage, ErrorReply, Hint, HintPart

ALICE = Subject("seat", "alice")
FULL = PlanReply(("a",), (), 0, (), (), (), short_bytes=1, free_bytes=0, staging="/s")
QUOTA = find_quota("g5.xlarge", True).link("")
NO_CONTAINERS = Mock(containers=Mock(list=Mock(return_value=[])))
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


def sent(error: ErrorMessage) -> LabError:
    """The error that labctl raises for a message of the agent."""
    reply = json.loads(encode(ErrorReply(error)))
    return caught(lambda: require_success("fetch", reply, 1, ""))


def agent_error(hint: Hint) -> LabError:
    return sent(Failure("link", "no address", "", hint).report)


def taken_alias() -> LabError:
    connections = Connections(Path("/nowhere"), None)
    connections.is_alias_free = Mock(return_value=False)  # type: ignore[method-assign]
    server = Server(
        id="i-1", lab="digits", lab_id="1", provider="aws", alias="digits",
        endpoint=Endpoint(host="192.0.2.1"), state="running", created_at=0.0,
        offer=Offer(provider="aws", type="small"),
    )  # fmt: skip
    return caught(lambda: connections.write(server))


def lost() -> LinkLostError:
    return make_link_lost_error(Endpoint(host="192.0.2.1"), "")


def cut_push() -> LabError:
    remote = Mock(call=Mock(side_effect=lost()))
    return caught(lambda: push_tree(remote, "digits", "1", "code", Path("/"), [], SilentReporter()))


def unconfirmed_push() -> LabError:
    push = object.__new__(_Push)
    push.request, push.root = Mock(target="code"), Path("/")
    push.reporter = Mock(confirm=Mock(return_value=False))
    large = Mock(size=2 * GIB)
    return caught(lambda: push._require_consent([large], 0))


def endless_output() -> LabError:
    output = BoundedOutput(Endpoint(host="192.0.2.1"))
    output._size = MOST_BYTES
    return caught(lambda: output.out(b"more"))


ERRORS: dict[str, tuple[Callable[[], LabError], str, str]] = {
    "full disk": (
        full_disk,
        "labctl ssh -- df -h\nlabctl push   # once there is space; nothing was sent",
        "labctl course ssh alice -- df -h\n"
        "labctl course up --only alice   # once there is space; nothing was sent",
    ),
    "failed write": (
        failed_write,
        "labctl ssh -- df -h\n"
        "labctl push   # once there is space; transferred data is kept and reused",
        "labctl course ssh alice -- df -h\nlabctl course up --only alice   "
        "# once there is space; transferred data is kept and reused",
    ),
    "agent, ssh": (
        lambda: agent_error(("check the address:\n", HintPart("ssh", "getent hosts x.org"))),
        "check the address:\nlabctl ssh -- getent hosts x.org",
        "check the address:\nlabctl course ssh alice -- getent hosts x.org",
    ),
    "agent, up": (
        lambda: agent_error(HintPart("up", "--ttl 8h   # or --idle 30m, --budget 5")),
        "labctl up --ttl 8h   # or --idle 30m, --budget 5",
        "labctl course up --only alice",
    ),
    "agent, no store": (
        lambda: agent_error(ADD_STORE),
        "add store: to lab.yaml, then:\nlabctl up",
        "add store: to course.yaml, then:\nlabctl course up --only alice",
    ),
    "agent, push": (
        lambda: agent_error(RESUME),
        "labctl push   # resumes where it stopped",
        "labctl course up --only alice   # resumes where it stopped",
    ),
    "agent, no run": (
        lambda: agent_error(STATUS_COMMAND),
        "labctl status",
        "labctl course status --only alice --refresh",
    ),
    "agent, the same for all": (
        lambda: agent_error("labctl doctor"),
        "labctl doctor",
        "labctl doctor",
    ),
    # Its text is for a lab; nothing here guesses what it would be for a seat.
    "agent before hints had parts": (
        lambda: sent(ErrorMessage("link", "no address", "", "labctl up")),
        "labctl up",
        "labctl up",
    ),
    "later agent": (
        lambda: sent(ErrorMessage("link", "no", "", "labctl boost", (HintPart("boost"),))),
        "labctl boost",
        "labctl boost",
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
        "labctl up --gpu auto\nlabctl up --provider static   # with this machine as a host",
        "change `gpu:` under `server:` in course.yaml",
    ),
    "AWS, quota": (
        lambda: make_launch_error(
            aws("MaxSpotInstanceCountExceeded"), Offer(provider="aws", type="g5.xlarge", spot=True)
        ),
        f"ask for more at {QUOTA}\nlabctl up --spot never   # instead",
        f"ask for more at {QUOTA}\nor set spot: never under server: in course.yaml",
    ),
    "AWS, gone": (
        lambda: caught(lambda: instances.require_instance(Mock(), "no-id")),
        "labctl status --refresh",
        "labctl course status --only alice --refresh",
    ),
    "local, gone": (
        lambda: caught(lambda: local._get_container(NO_CONTAINERS, "no-id")),
        "labctl status",
        "labctl course status --only alice --refresh",
    ),
    "lost link": (lost, "labctl status", "labctl course status --only alice --refresh"),
    "slow command": (
        lambda: make_timeout_error(Endpoint(host="192.0.2.1")),
        "labctl status",
        "labctl course status --only alice --refresh",
    ),
    "cut push": (
        cut_push,
        "labctl push   # transferred data is kept and reused",
        "labctl course up --only alice   # transferred data is kept and reused",
    ),
    "large push": (
        unconfirmed_push,
        "labctl push   # after you exclude files in .labignore",
        "labctl course up --only alice   # after you exclude files in .labignore",
    ),
    "unreadable record": (
        lambda: caught(lambda: state._decode("{", Server)),
        "labctl status --refresh",
        "labctl course status --only alice --refresh",
    ),
    "endless output": (
        endless_output,
        "write the output to a file on the server, then:\nlabctl pull",
        "write the output to a file on the server, then:\n"
        "labctl course down --only alice   # downloads the files of runs",
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
    monkeypatch.setattr(playbooks, "_run", lambda *_: 2)
    host = ansible.Host(alias="ml-8a41", ssh_config=tmp_path / "config", user="student")
    with pytest.raises(LabError, match="could not prepare alice"):
        playbooks.run_playbook(host, tmp_path, SilentReporter(), server_name="alice")
    with pytest.raises(LabError, match="could not prepare ml-8a41"):
        playbooks.run_playbook(host, tmp_path, SilentReporter())


def test_a_labctl_of_before_gets_the_hint_as_text() -> None:
    """It reads these keys, and ignores the others."""
    body = json.loads(encode(Failure("missing", "no store", "", ADD_STORE).report))
    assert body["hint"] == "add store: to lab.yaml, then:\nlabctl up"
    assert {key: body[key] for key in ("kind", "what", "why")} == {
        "kind": "missing",
        "what": "no store",
        "why": "",
    }


def test_a_failure_keeps_its_hint_through_another_process_of_the_agent() -> None:
    """As root, in a Python with boto3, or in the mirror."""
    line = encode_line(ErrorReply(Failure("missing", "no store", "", ADD_STORE).report)).decode()
    with pytest.raises(Failure) as raised:
        parse_reply(PROBE_STORE, line, "")
    error = sent(raised.value.report)
    error.subject = ALICE
    assert error.hint == "add store: to course.yaml, then:\nlabctl course up --only alice"


def test_checks_of_providers_name_the_commands_of_the_course() -> None:
    refused = make_refused_error(Endpoint(host="192.0.2.1"), "")
    machine = Mock()
    machine.name = "gpu1"
    check = static._check(machine, refused, COURSE)
    assert check.next.startswith("labctl course up   # finds")
    assert "\nlabctl course status --refresh   # says whether" in check.next
    provider = Mock(context=Mock(subject=COURSE))
    provider.offers = lambda need: fit.offers(need, [], fit.AwsConditions())
    no_offer = caught(lambda: AwsProvider._list_offers(provider, NEED))
    assert no_offer.hint == "labctl course up"


def test_the_subject_nearest_to_an_error_counts() -> None:
    with pytest.raises(LinkLostError) as raised, assign_subject(COURSE), assign_subject(ALICE):
        raise lost()
    assert raised.value.hint == "labctl course status --only alice --refresh"
    with pytest.raises(LinkLostError) as raised, assign_subject(COURSE):
        raise lost()
    assert raised.value.hint == "labctl course status --refresh"


def restored_note(context: Mock) -> str:
    reply = Mock(runs=("night",), edits=(), files=3, _fields=())
    context.open_agent.return_value.call.return_value = reply
    disk = Resource(provider="aws", kind="volume", id="vol-1")
    with patch.multiple(disk_restore, runs=Mock(), to_json=Mock(return_value={})):
        disk_restore._copy_disk(context, Mock(), disk)
    return str(context.reporter.emit.call_args.args[0].text)


def unmirrored_note(context: Mock) -> str:
    lab_store._warn(context, "no key")
    return str(context.reporter.emit.call_args.args[0].text)


def early_timer_note(context: Mock) -> str:
    return deadlines._describe_timer_failure(context, 1.0, 2.0, LabError("no"))


@pytest.mark.parametrize(
    ("make", "lab", "seat"),
    [
        (early_timer_note, "\n  next: labctl up", "\n  next: labctl course up --only alice"),
        (unmirrored_note, ": no key; instead: labctl pull --follow", ": no key"),
        (restored_note, "1 run with 3 files\n  next: labctl pull", "1 run with 3 files"),
    ],
)
def test_a_note_names_no_command_of_a_lab_to_a_course(
    make: Callable[[Mock], str], lab: str, seat: str
) -> None:
    assert make(Mock(subject=LAB)).endswith(lab)
    assert make(Mock(subject=ALICE)).endswith(seat)
