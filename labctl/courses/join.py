"""Joining a course from the student's machine, with a join file and a key generated here."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from pathlib import Path

import msgspec

from labctl.config import Paths, expand_user, load_lab, student_key, trust
from labctl.config.identity import replace_file
from labctl.config.times import machine_time_text
from labctl.courses.course_lab_file import update_lab_file
from labctl.courses.invitation import MOST_BYTES, JoinInvitation, derive_enrollment_key, read_join
from labctl.courses.keys import JOIN_REQUEST
from labctl.courses.starter_delivery import (
    DeliveredStarter,
    deliver_starters,
    describe_course_lab,
    write_assignments,
)
from labctl.errors import (
    AuthenticationError,
    BusyError,
    ConnectError,
    HostKeyError,
    LabError,
    NotFoundError,
    PolicyError,
    UsageError,
)
from labctl.errors.replies import decode_reply
from labctl.events import Question, Reporter
from labctl.http_client import is_confidential, open_session, read_body
from labctl.model import Endpoint, Value
from labctl.providers.course import REQUEST as KEEPER_REQUEST
from labctl.providers.course import download_starter
from labctl.servers.connections import Connections
from labctl.servers.host_keys import ensure_key_pair, fingerprint
from labctl.servers.provider_traits import read_provider_traits
from labctl.submissions.assignment import SSH_PLACE
from labctl.transports.forced_command import LineChannel
from labctl.wire.codec import MessageError
from labctl.wire.keeper import (
    ENROLL,
    FETCH_STARTER,
    GREET_KEEPER,
    CourseRecord,
    EnrollRequest,
    FetchStarterReply,
    FetchStarterRequest,
    GreetKeeperRequest,
)
from labctl.wire.line_requests import encode_request
from labctl.wire.verbs import Reply, Request, Verb

URL_S = 20.0


class JoinResult(Value, frozen=True):
    """The result of joining a course.

    `directory` is a lab whose servers come from the course. `again` is True if the keeper knew the
    key already.
    """

    course: str
    student: str
    directory: Path
    assignments: tuple[str, ...] = ()
    again: bool = False
    # What to add to a lab.yaml that existed already; "" if nothing is left to add.
    section: str = ""
    # The labs of the assignments that hand out files.
    starters: tuple[DeliveredStarter, ...] = ()
    # The course's image, and what happened with it in lab.yaml, as in LabFileUpdate.
    image: str = ""
    image_change: str = ""


def fetch_join_file(place: str) -> bytes:
    """Read a join file from a path or an https:// address; NotFoundError if it does not exist."""
    if "://" not in place:
        try:
            with expand_user(place).open("rb") as file:
                return file.read(MOST_BYTES + 1)
        except OSError as error:
            raise NotFoundError(
                f"{place} cannot be read",
                why=error.strerror or "",
                hint="labctl join FILE   # where you saved the join file from your instructor",
            ) from None
    if not is_confidential(place):
        raise UsageError(
            f"{place} is not an https:// address",
            why="without https, others could read the code and use it first",
            hint="labctl join FILE   # or its https:// address",
        )
    return _download(place)


def _download(place: str) -> bytes:
    try:
        with open_session() as session, session.get(place, timeout=URL_S, stream=True) as response:
            if not is_confidential(response.url):
                raise PolicyError(
                    f"{place} redirects to an address without https",
                    why=response.url[:200],
                    hint="ask your instructor for the file, then:\nlabctl join FILE",
                )
            if not response.ok:
                raise NotFoundError(
                    f"no join file at {place}",
                    why=f"the server answered {response.status_code} {response.reason}",
                    hint="ask your instructor for another, made with:\n"
                    "labctl course invite STUDENT",
                )
            return read_body(response, MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConnectError(
            f"{place} cannot be read",
            why=str(error),
            hint="labctl join FILE   # with a local file, or try again later",
        ) from None


def join_course(
    data: bytes,
    into: Path | None,
    paths: Paths,
    reporter: Reporter,
    *,
    key: str = "",
    base: Path = Path(),
) -> JoinResult:
    """Enroll this account's key with the file's code, and write a lab.

    The lab goes to `into`, or to a directory below `base` named after the course. Repeating it
    finds the key enrolled and writes what is missing. PolicyError if the file was changed, was
    used already or has expired, or if the user declines; nothing is sent then.
    """
    invitation = read_join(data, key=key)
    target = (into or base / invitation.course).absolute()
    _require_consent(invitation, target, reporter)
    connections = Connections(paths.ssh_dir, paths.user_ssh_config)
    public = ensure_key_pair(student_key(paths))
    again = False
    try:
        description = _enroll(connections, invitation, public)
    except (AuthenticationError, PolicyError) as error:
        if isinstance(error, HostKeyError):
            error.hint = "tell your instructor: the keeper's host key differs from your join file's"
            raise
        description, again = _greet_enrolled(connections, invitation, paths, error), True
    names = write_assignments(target, description.assignments or {})
    update = update_lab_file(
        describe_course_lab(invitation, target, description.image, description.executor),
        paths,
        # The reply of a keeper that is busy describes no course.
        is_current=description.assignments is not None,
    )
    if not update.section:
        config = load_lab(target, find_provider=read_provider_traits)
        trust(paths, config)
    starters = _deliver(connections, invitation, paths, target, description)
    return JoinResult(
        course=invitation.course,
        student=invitation.student,
        directory=target,
        assignments=names,
        again=again,
        section=update.section,
        starters=starters,
        image=description.image,
        image_change=update.image_change,
    )


def _deliver(
    connections: Connections,
    invitation: JoinInvitation,
    paths: Paths,
    target: Path,
    description: CourseRecord,
) -> tuple[DeliveredStarter, ...]:
    """Fetch the starters of the course, over one channel with this account's key."""
    identity = str(student_key(paths))
    channel = _open_channel(connections, invitation, identity, KEEPER_REQUEST)

    def send(request: FetchStarterRequest) -> FetchStarterReply:
        return _exchange(channel, invitation.keeper, FETCH_STARTER, request)

    with contextlib.closing(channel):
        return deliver_starters(
            describe_course_lab(invitation, target, description.image, description.executor),
            description.starters or {},
            description.assignments or {},
            functools.partial(download_starter, send),
            paths,
        )


def _require_consent(invitation: JoinInvitation, target: Path, reporter: Reporter) -> None:
    question = (
        f"join the course {invitation.course} as {invitation.student}, "
        f"in the directory {target.name}?"
    )
    detail = (
        f"keeper    {invitation.keeper}\nhost key  {fingerprint(invitation.host_key)}\n"
        f"signed by {invitation.receiver}\nvalid to  {machine_time_text(invitation.expires)}"
    )
    if not reporter.confirm(Question(question=question, detail=detail, default=True)):
        raise PolicyError(
            "nothing was sent",
            why="you have not joined the course",
            hint="labctl join FILE   # when you want to join",
        )


def _enroll(connections: Connections, invitation: JoinInvitation, public: str) -> CourseRecord:
    """Exchange the code for this account's key; return the keeper's description of the course."""
    private, _ = derive_enrollment_key(invitation)
    with tempfile.TemporaryDirectory() as folder:
        identity = Path(folder) / "code"
        replace_file(identity, private)
        channel = _open_channel(connections, invitation, str(identity), JOIN_REQUEST)
        return _send_request(channel, invitation, ENROLL, EnrollRequest(public)).joined


def _greet_enrolled(
    connections: Connections, invitation: JoinInvitation, paths: Paths, error: LabError
) -> CourseRecord:
    """Return the course's description if this key was enrolled before, with the code used up."""
    channel = _open_channel(connections, invitation, str(student_key(paths)), KEEPER_REQUEST)
    try:
        hello = _send_request(channel, invitation, GREET_KEEPER, GreetKeeperRequest()).hello
    except AuthenticationError:
        raise PolicyError(
            "this join file was already used or revoked",
            why="each join file works only once",
            hint="ask your instructor for another, made with:\n"
            f"labctl course invite {invitation.student}",
        ) from None
    except BusyError as busy:
        if isinstance(busy, ConnectError):
            raise error from None
        return CourseRecord(invitation.course, invitation.student)
    if hello.student != invitation.student:
        raise PolicyError(
            f"this account's key already belongs to {hello.student!a}",
            why="a key belongs to one student",
            hint="labctl join FILE   # from your own account",
        )
    return CourseRecord(
        hello.course, hello.student, hello.image, hello.receiver, hello.assignments, hello.starters
    )


def _open_channel(
    connections: Connections, invitation: JoinInvitation, identity: str, request: str
) -> LineChannel:
    """Return a channel to a forced command of the keeper; the first line connects it."""
    place = SSH_PLACE.fullmatch(invitation.keeper)
    assert place is not None
    endpoint = Endpoint(
        host=place["host"],
        port=int(place["port"] or 22),
        user=place["user"],
        identity=identity,
        host_key=invitation.host_key,
    )
    return connections.open_line_channel(endpoint, request)


def _send_request(
    channel: LineChannel,
    invitation: JoinInvitation,
    verb: Verb[Request, Reply],
    request: Request,
) -> Reply:
    """Send the only request of a channel and close it; raise the error that the keeper reports."""
    with contextlib.closing(channel):
        return _exchange(channel, invitation.keeper, verb, request)


def _exchange(
    channel: LineChannel, keeper: str, verb: Verb[Request, Reply], request: Request
) -> Reply:
    line = channel.exchange(encode_request(verb, request))
    try:
        return decode_reply(verb.reply, line)
    except MessageError:
        raise LabError(
            f"{keeper} answers, but is not a keeper",
            hint="ask your instructor whether the keeper is running",
        ) from None


def result_as_json(joined: JoinResult) -> object:
    """Return the result for --json."""
    value: object = msgspec.to_builtins(joined, enc_hook=str)
    return value
