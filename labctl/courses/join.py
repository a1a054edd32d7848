"""Joining a course, from the student's machine: once, with a join file and a key made here."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from labctl.config import Paths, load_lab, student_key, trust
from labctl.config.identity import write_private
from labctl.courses.invitation import MOST_BYTES, Join, enrolment_key, read_join
from labctl.courses.keys import JOIN_REQUEST
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
from labctl.errors.replies import raised, reply_in
from labctl.events import Decision, Reporter
from labctl.model import NAME_PATTERN, Endpoint, Value
from labctl.providers import provider_class
from labctl.providers.course import REQUEST as DOOR_REQUEST
from labctl.servers.connections import Connections
from labctl.servers.host_keys import fingerprint, make_key, replace_file
from labctl.submissions.assignment import SSH_PLACE
from labctl.submissions.receipt import utc_text

URL_S = 20.0
MOST_ASSIGNMENTS, MOST_TEXT = 100, 64 * 1024
_LOOPBACK = re.compile(r"http://(127\.0\.0\.1|localhost)(:[0-9]{1,5})?/\S*")


class Joined(Value, frozen=True):
    """What came of it. `directory` is a lab whose servers the course gives; `again`: the key was
    known there already."""

    course: str
    student: str
    directory: Path
    assignments: tuple[str, ...] = ()
    again: bool = False
    # What to write into a lab.yaml that was there already; "" where it was written.
    section: str = ""


def fetch(place: str) -> bytes:
    """A join file from a path, or from an https:// address; NotFoundError where there is none."""
    if "://" not in place:
        try:
            with Path(place).expanduser().open("rb") as file:
                return file.read(MOST_BYTES + 1)
        except OSError as error:
            raise NotFoundError(
                f"{place} cannot be read", why=error.strerror or "", hint="labctl join FILE"
            ) from None
    if not place.startswith("https://") and not _LOOPBACK.fullmatch(place):
        raise UsageError(
            f"{place} is no address to join by",
            why="over anything but https:// others could read the code, and use it first",
            hint="labctl join FILE   # or its https:// address",
        )
    return _downloaded(place)


def _downloaded(place: str) -> bytes:
    import http.client
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(place, timeout=URL_S) as answer:
            if not answer.url.startswith(("https://", "http://127.0.0.1", "http://localhost")):
                raise PolicyError(
                    f"{place} leads elsewhere, without https",
                    why=answer.url[:200],
                    hint="ask your instructor for the file: labctl join FILE",
                )
            found: bytes = answer.read(MOST_BYTES + 1)
            return found
    except urllib.error.HTTPError as error:
        error.close()
        raise NotFoundError(
            f"there is no join file at {place}",
            why=f"{error}",
            hint="ask your instructor for another: labctl course invite",
        ) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ConnectError(
            f"{place} cannot be read",
            why=str(error),
            hint="labctl join FILE   # with the file itself, or try again later",
        ) from None


def join(
    data: bytes,
    into: Path | None,
    paths: Paths,
    reporter: Reporter,
    *,
    key: str = "",
    base: Path = Path(),
) -> Joined:
    """Enrol this account's key with the file's code, and write a lab into `into`, or into
    a directory of the course's name below `base`.

    Repeated, it finds the key enrolled and writes what is missing. PolicyError where the file was
    changed, is used up or too old, or the person says no; nothing is sent then.
    """
    found = read_join(data, key=key)
    target = (into or base / found.course).absolute()
    _agree(found, target, reporter)
    connections = Connections(paths.ssh_dir, paths.user_ssh_config)
    public = make_key(student_key(paths))
    again = False
    try:
        told = _enrolled(connections, found, public)
    except (AuthenticationError, PolicyError) as error:
        if isinstance(error, HostKeyError):
            error.hint = "tell your instructor: the keeper shows another host key than your file"
            raise
        told, again = _known(connections, found, paths, error), True
    names = _write_assignments(target, told)
    section = _write_lab(target, found, str(told.get("image") or ""))
    if not section:
        config = load_lab(target, settings_type=lambda name: provider_class(name).settings_type)
        trust(paths, config)
    return Joined(
        course=found.course,
        student=found.student,
        directory=target,
        assignments=names,
        again=again,
        section=section,
    )


def _agree(found: Join, target: Path, reporter: Reporter) -> None:
    question = f"join {found.course} as {found.student}, with {target.name} as your lab?"
    detail = (
        f"keeper    {found.keeper}\nhost key  {fingerprint(found.host_key)}\n"
        f"signed by {found.receiver}\nvalid to  {utc_text(found.expires)}"
    )
    if not reporter.ask(Decision(question=question, detail=detail, default=True)):
        raise PolicyError(
            "nothing was sent", why="joining was not agreed to", hint="labctl join FILE --yes"
        )


def _enrolled(connections: Connections, found: Join, public: str) -> dict[str, Any]:
    """What the keeper tells of the course once it has this account's key in place of the code's."""
    private, _ = enrolment_key(found)
    with tempfile.TemporaryDirectory() as folder:
        identity = Path(folder) / "code"
        replace_file(identity, private)
        asked = {"do": "enrol", "public_key": public}
        said = _asked(connections, found, str(identity), JOIN_REQUEST, asked)
    told: dict[str, Any] = said["joined"]
    return told


def _known(connections: Connections, found: Join, paths: Paths, error: LabError) -> dict[str, Any]:
    """The same, where this very key was enrolled before: the code alone is used up then."""
    asked = {"do": "hello"}
    try:
        said = _asked(connections, found, str(student_key(paths)), DOOR_REQUEST, asked)
    except AuthenticationError:
        raise PolicyError(
            "this join file opens nothing any more",
            why="it works once; somebody has used it, or it was taken back",
            hint="ask your instructor for another: labctl course invite",
        ) from None
    except BusyError as busy:
        if isinstance(busy, ConnectError):
            raise error from None
        return {}
    hello: dict[str, Any] = said["hello"]
    if hello.get("student") != found.student:
        raise PolicyError(
            f"this account's key is {hello.get('student')!a}'s already",
            why="a key belongs to one student",
            hint="labctl join FILE   # in an account of your own",
        )
    return hello


def _asked(
    connections: Connections, found: Join, identity: str, request: str, asked: dict[str, Any]
) -> dict[str, Any]:
    place = SSH_PLACE.fullmatch(found.keeper)
    assert place is not None
    endpoint = Endpoint(
        host=place["host"],
        port=int(place["port"] or 22),
        user=place["user"],
        identity=identity,
        host_key=found.host_key,
    )
    lines = connections.talk(endpoint, request)
    try:
        answer = lines.ask(json.dumps(asked).encode() + b"\n")
    finally:
        lines.close()
    reply = reply_in(answer.decode(errors="replace"))
    if reply is None:
        raise LabError(
            f"{found.keeper} does not answer as a keeper does",
            hint="ask your instructor whether their keeper runs: labctl course serve",
        )
    if (error := raised(reply)) is not None:
        raise error
    return reply


def _write_assignments(target: Path, told: dict[str, Any]) -> tuple[str, ...]:
    """Each assignment's file; what the keeper calls one must be a name, and no path."""
    given = told.get("assignments")
    texts = given if isinstance(given, dict) else {}
    names = sorted(
        name
        for name, text in texts.items()
        if NAME_PATTERN.fullmatch(name) and isinstance(text, str) and len(text) <= MOST_TEXT
    )[:MOST_ASSIGNMENTS]
    for name in names:
        write_private(target / "assignments" / f"{name}.yaml", texts[name].encode())
    return tuple(names)


def _write_lab(target: Path, found: Join, image: str) -> str:
    """A lab.yaml where there is none; else what is to be written into the one that is there."""
    section = (
        "server:\n"
        "  provider: course\n"
        "  course:\n"
        f"    course: {found.course}\n"
        f"    student: {found.student}\n"
        f"    keeper: {found.keeper}\n"
        f'    host_key: "{found.host_key}"\n'
        f'    seat: "{found.seat}"\n'
    )
    file = target / "lab.yaml"
    if file.exists():
        return "" if f'seat: "{found.seat}"' in file.read_text() else section
    name = f"{found.course}-{found.student}"[:39].rstrip("-")
    head = f"# Written by `labctl join`: servers come from the keeper of {found.course}.\n"
    body = f"{head}lab: {name}\n{section}"
    if image:
        body += f"image: {json.dumps(image)}\n"
    target.mkdir(parents=True, exist_ok=True)
    replace_file(file, body.encode(), mode=0o644)
    return ""


def encoded(joined: Joined) -> dict[str, Any]:
    """For --json."""
    made: dict[str, Any] = msgspec.to_builtins(joined, enc_hook=str)
    return made
