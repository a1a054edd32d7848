"""Join files: what a student needs to reach the keeper once, signed by the course.

A file holds the keeper's address and pinned host key, the key that signs receipts, and a one-time
code. The code is a password in a form that any sshd can check: both sides derive the same key pair
from it. Over SSH that key may only enroll the key that the student's machine has generated. After
that, or once it has expired, the code opens nothing but the page for students (`join_codes`).
"""

from __future__ import annotations

import base64
import os
import time
from pathlib import Path

import msgspec

from labctl.config.identity import write_private
from labctl.config.times import machine_time_text
from labctl.courses.join_codes import (
    LONGEST,
    SHORTEST,
    derive_key_pair,
    mark_page_code_used,
    store_page_code,
)
from labctl.courses.keys import AuthorizedKeys, keeper_dir, make_join_file_invalid_error, parse_key
from labctl.courses.records.folder import CourseFolder
from labctl.courses.records.gitignore import JOIN_FILES, ignore_in_git
from labctl.decoding import decode_json
from labctl.errors import ConfigError, PolicyError, UsageError
from labctl.model import NAME_PATTERN, Value
from labctl.submissions.assignment import SSH_PLACE
from labctl.submissions.receipt import is_signed, sign_bytes
from labctl.submissions.receiver import Receiver
from labctl.submissions.untrusted_json import UPGRADE, decode_untrusted_json, is_newer_version

KIND = "labctl-join"
VERSION = 1
MOST_BYTES = 16 * 1024
CODE_BYTES = 20
VALID_S = 14 * 86_400
_DOMAIN = b"labctl join 1\n"


class JoinInvitation(Value, frozen=True, forbid_unknown_fields=True):
    """The contents of a join file. `seat` is the lab id of the student's servers.

    `keeper` is ssh://user@host[:port], `receiver` the course's signing key, `expires` in Unix
    seconds.
    """

    kind: str
    version: int
    course: str
    course_id: str
    student: str
    seat: str
    keeper: str
    host_key: str
    receiver: str
    code: str
    expires: int


class JoinFile(Value, frozen=True, forbid_unknown_fields=True):
    join: JoinInvitation
    signature: str


class Invitation(Value, frozen=True):
    """A join file that was written, with its student, path and expiry (Unix time)."""

    student: str
    email: str
    path: Path
    expires: int


class _PendingInvitation(Value, frozen=True):
    """The keeper's record of an open invitation. It never holds the code."""

    public: str
    expires: int


def invite(
    folder: CourseFolder,
    student: str,
    into: Path,
    keys: AuthorizedKeys,
    host_key: str,
    valid_s: int = VALID_S,
) -> Invitation:
    """Write a student's join file (0600) and activate its code; an earlier file becomes invalid.

    PolicyError if the student has left, UsageError if course.yaml names no keeper.
    """
    recipient = folder.find_student(student)
    if not recipient.active:
        raise PolicyError(f"{student} has left the course", hint="labctl course roster")
    keeper = keeper_address(folder)
    into.mkdir(parents=True, exist_ok=True)
    _keep_out_of_git(folder, into)
    receiver = Receiver(folder.drop).init()
    expires = int(time.time()) + valid_s
    join = JoinInvitation(
        kind=KIND,
        version=VERSION,
        course=folder.config.name,
        course_id=folder.id,
        student=recipient.id,
        seat=folder.find_seat_of(recipient).lab_id,
        keeper=keeper,
        host_key=" ".join(host_key.split()[:2]),
        receiver=receiver,
        code=base64.b32encode(os.urandom(CODE_BYTES)).decode().lower(),
        expires=expires,
    )
    public = derive_enrollment_key(join)[1]
    write_private(
        _record_path(folder, recipient.id),
        msgspec.json.encode(_PendingInvitation(public=public, expires=expires)),
    )
    keys.invite(recipient.id, public)
    store_page_code(folder, recipient.id, public, expires)
    signature = sign_bytes(_signed_bytes(join), Receiver(folder.drop).key)
    path = into / f"{folder.config.name}-{recipient.id}.join"
    text = msgspec.json.format(msgspec.json.encode(JoinFile(join=join, signature=signature)))
    write_private(path, text + b"\n")
    return Invitation(student=recipient.id, email=recipient.email, path=path, expires=expires)


def enroll(
    folder: CourseFolder, student: str, public: str, keys: AuthorizedKeys, now: float
) -> None:
    """Authorize the student's own key in exchange for the invitation, which is then used up.

    PolicyError if the invitation was used before, or has expired.
    """
    record = _record_path(folder, student)
    try:
        invitation = decode_json(record.read_bytes(), _PendingInvitation)
    except FileNotFoundError:
        raise make_join_file_invalid_error() from None
    if invitation.expires < now:
        keys.withdraw([student])
        raise make_join_file_invalid_error()
    if not folder.find_student(student).active:
        raise PolicyError(f"{student} has left the course", hint="ask your instructor")
    seat = folder.find_seat_of(student).name
    keys.admit(student, public, instead_of=invitation.public)
    record.unlink(missing_ok=True)
    mark_page_code_used(folder, student)
    folder.ledger.append("joined", seat=seat, student=student, by=student)


def withdraw_expired(folder: CourseFolder, keys: AuthorizedKeys, now: float) -> list[str]:
    """Revoke expired invitations; return their students."""
    expired = []
    for path in (keeper_dir(folder) / "invitations").glob("[!.]*.json"):
        try:
            invitation = decode_json(path.read_bytes(), _PendingInvitation)
        except (FileNotFoundError, msgspec.MsgspecError):
            continue
        if invitation.expires < now:
            expired.append(path.stem)
            path.unlink(missing_ok=True)
    if expired:
        keys.withdraw(expired)
    return sorted(expired)


def read_join(data: bytes, *, key: str = "", now: float | None = None) -> JoinInvitation:
    """Parse a join file and verify its signature. ConfigError if it is not a join file.

    PolicyError if it was changed, is signed by another key than `key`, or has expired.
    """
    try:
        if len(data) > MOST_BYTES:
            raise ValueError("it is too large")
        if is_newer_version(data, "join", KIND, VERSION):
            raise ConfigError(
                "this join file was made by a newer labctl",
                why=f"this labctl reads version {VERSION} of join files",
                hint=UPGRADE,
            )
        file = decode_untrusted_json(data, JoinFile)
        _check_contents(file.join)
    except ValueError as error:
        raise ConfigError(
            "this is not a join file", why=str(error), hint="ask your instructor for yours"
        ) from None
    if not is_signed(_signed_bytes(file.join), file.signature, file.join.receiver):
        raise PolicyError(
            "this join file was changed after it was signed",
            why="it could lead your work to somebody else's machine",
            hint="ask your instructor for another, and do not edit it",
        )
    if key and key != file.join.receiver:
        raise PolicyError(
            f"this join file does not belong to the course with the key {key}",
            why=f"it is signed by {file.join.receiver}",
            hint="ask your instructor",
        )
    if file.join.expires < (time.time() if now is None else now):
        raise PolicyError(
            f"this join file expired on {machine_time_text(file.join.expires)}",
            hint="ask your instructor for another, made with:\n"
            f"labctl course invite {file.join.student}",
        )
    return file.join


def derive_enrollment_key(join: JoinInvitation) -> tuple[bytes, str]:
    """Derive the code's key pair: the private key in OpenSSH's format, and the public line."""
    return derive_key_pair(join.course_id, join.student, join.code)


def keeper_address(folder: CourseFolder) -> str:
    """Return the keeper of course.yaml as ssh://user@host:port; UsageError if it names none."""
    keeper = folder.config.keeper
    if keeper is None:
        raise UsageError(
            "course.yaml names no keeper",
            why="students could not reach it",
            hint="keeper: {host: keeper.example.edu, user: labctl}   # in course.yaml",
        )
    return f"ssh://{keeper.user}@{keeper.host}:{keeper.port}"


def _check_contents(join: JoinInvitation) -> None:
    """Raise ValueError for invalid contents, before any of them is used."""
    if join.kind != KIND or join.version != VERSION:
        raise ValueError("it is of another kind or version")
    for name in (join.course, join.student, join.seat):
        if not NAME_PATTERN.fullmatch(name):
            raise ValueError(f"{name[:60]!a} is not a name")
    if not SSH_PLACE.fullmatch(join.keeper):
        raise ValueError(f"{join.keeper[:60]!a} is not the address of a keeper")
    try:
        parse_key(join.host_key)
    except UsageError:
        raise ValueError("its host key is not a public key") from None
    if not SHORTEST <= len(join.code) <= LONGEST or not join.code.isalnum():
        raise ValueError("its code is malformed")


def _keep_out_of_git(folder: CourseFolder, into: Path) -> None:
    """Have git ignore join files, also in folders that an earlier version created."""
    ignore_in_git(folder.path)
    if not into.resolve().is_relative_to(folder.path.resolve()):
        ignore_in_git(into, JOIN_FILES)


def _record_path(folder: CourseFolder, student: str) -> Path:
    return keeper_dir(folder) / "invitations" / f"{student}.json"


def _signed_bytes(join: JoinInvitation) -> bytes:
    return _DOMAIN + msgspec.json.encode(join, order="deterministic")
