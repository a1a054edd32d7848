"""The instructor's side: an assignment's file, students' keys, tickets for a bucket."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from labctl.config.identity import write_draft
from labctl.config.scalars import parse_duration
from labctl.config.times import parse_moment
from labctl.errors import ConfigError, ConnectError, PolicyError, Problem, UsageError
from labctl.model import Endpoint
from labctl.submissions.assignment import (
    SSH_PLACE,
    Assignment,
    Standing,
    assignment_text,
    parse_assignment,
)
from labctl.submissions.collect import Collected, collect
from labctl.submissions.receiver import Receiver, checked

KEY_LINE = re.compile(
    r"(ssh-ed25519|ecdsa-sha2-nistp(?:256|384|521)|ssh-rsa|sk-ssh-ed25519@openssh\.com) "
    r"([A-Za-z0-9+/]{60,2000}={0,2})(?: .*)?"
)
# The comment of a student's line in authorized_keys.
MARK = "labctl-submit:"


def write_assignment(receiver: Receiver, name: str, place: str, given: Mapping[str, object]) -> str:
    """Write an assignment's file into the receiver's directory, and return its text.

    `given` are due, late, penalty, max_size, require, host_key and course as they were typed; a
    due time in a named zone is written with its offset, so that no machine need know the zone.
    ConfigError for what makes no sense.
    """
    due = str(given.get("due") or "")
    if due:
        try:
            due = str(parse_moment(due))
        except ValueError as error:
            raise _wrong(name, (Problem("due", 0, str(error)),)) from None
    host_key = str(given.get("host_key") or "")
    if place.startswith("ssh://") and not host_key:
        host_key = _host_key(place)
    require = given.get("require") or ("model",)
    assert isinstance(require, tuple | list)
    lines = {
        "assignment": checked(name),
        "course": str(given.get("course") or ""),
        "due": due,
        "late": str(given.get("late") or "never"),
        "penalty": str(given.get("penalty") or "0"),
        "max_size": str(given.get("max_size") or "500MB"),
        "require": [str(one) for one in require],
        "hand_in": place,
        "host_key": host_key,
        "receiver": receiver.public(),
    }
    problems: list[Problem] = []
    body = msgspec.json.encode({key: value for key, value in lines.items() if value})
    found = parse_assignment(body, problems)
    if found is None:
        raise _wrong(name, tuple(problems))
    text = assignment_text(found)
    file = receiver.assignment_file(name)
    write_draft(file, text.encode(), mode=0o600).replace(file)
    return text


def extend(receiver: Receiver, name: str, student: str, text: str) -> tuple[Standing, str]:
    """Move a student's due time; (how it stands then, the due time as it is for all)."""
    try:
        seconds = 0 if text == "0" else parse_duration(text)
    except ValueError as error:
        raise UsageError(str(error), hint="labctl receive extend DIR hw3 alice 3d") from None
    receiver.extend(name, student, seconds)
    return receiver.standing(name, student), str(receiver.rules(name).due or "")


def admit(receiver: Receiver, student: str, key: str, file: Path) -> str:
    """Let a student's public key hand in under their name, and do nothing else; the line.

    In place of the key that the student had. UsageError where it is no public key, PolicyError
    where another student has it.
    """
    match = KEY_LINE.fullmatch(key.strip())
    if match is None:
        raise UsageError(
            "this is no public key",
            why="one line is needed, as `labctl submit --key` prints it: ssh-ed25519 AAAA...",
            hint="labctl submit --key   # on the student's machine",
        )
    receiver.public()
    words = [*program_words(), "receive", "serve", str(receiver.directory), checked(student)]
    command = shlex.join(words)
    if re.search(r'["\\\n]', command):
        raise UsageError(
            f"{receiver.directory} cannot stand in authorized_keys",
            hint="labctl receive init ~/drop   # a path of letters, digits and /._-",
        )
    line = f'restrict,command="{command}" {match[1]} {match[2]} {MARK}{student}'
    others = [one for one in _lines(file) if not one.endswith(f" {MARK}{student}")]
    if any(f" {match[2]} " in f"{one} " for one in others):
        raise PolicyError(
            "this key is let in already, as somebody else's",
            why="sshd takes the first line that has it",
            hint=f"look at {file}",
        )
    _replace(file, [*others, line])
    return line


def expel(student: str, file: Path) -> bool:
    """Take a student's line away; whether there was one."""
    known = _lines(file)
    left = [one for one in known if not one.endswith(f" {MARK}{checked(student)}")]
    if len(left) < len(known):
        _replace(file, left)
    return len(left) < len(known)


def write_tickets(
    receiver: Receiver,
    name: str,
    students: Iterable[str],
    valid: str,
    into: Path,
    profile: str = "",
) -> list[Path]:
    """The assignment's file for each student, with leave to post into its bucket (0600)."""
    from labctl.submissions.buckets import LONGEST_S, Bucket

    rules = receiver.rules(name)
    try:
        valid_s = parse_duration(valid)
    except ValueError as error:
        raise UsageError(str(error), hint="--valid 7d") from None
    if valid_s > LONGEST_S:
        raise UsageError(
            f"--valid {valid} is too long",
            why="S3 believes a signature for 7 days",
            hint="labctl receive ticket ~/drop hw3 alice --valid 7d",
        )
    bucket = Bucket(_in_bucket(rules), profile)
    bucket.check_versioned()
    into.mkdir(parents=True, exist_ok=True)
    written = []
    for student in students:
        ticket = bucket.ticket(rules, checked(student), valid_s)
        own = msgspec.structs.replace(rules, student=student, ticket=ticket)
        path = into / f"{name}-{student}.yaml"
        write_draft(path, assignment_text(own).encode(), mode=0o600).replace(path)
        written.append(path)
    return written


def collect_posts(receiver: Receiver, name: str, profile: str = "") -> list[Collected]:
    """Take in what was posted into the assignment's bucket."""
    from labctl.submissions.buckets import Bucket

    bucket = Bucket(_in_bucket(receiver.rules(name)), profile)
    return collect(receiver, bucket, name)


def _in_bucket(rules: Assignment) -> str:
    if not rules.hand_in.startswith("s3://"):
        raise UsageError(
            f"{rules.name} is not handed in through a bucket",
            why=f"it goes to {rules.hand_in}, where `labctl receive admit` lets students in",
            hint="labctl receive admit ~/drop alice alice.pub",
        )
    return rules.hand_in


def _host_key(place: str) -> str:
    """The key that the SSH server shows from here."""
    from labctl.transports.fabric_login import fetch_host_key

    way = SSH_PLACE.fullmatch(place)
    if way is None:
        return ""
    port = int(way["port"] or 22)
    try:
        return fetch_host_key(Endpoint(host=way["host"], port=port, user=way["user"]))
    except ConnectError as error:
        error.hint = "--host-key 'ssh-ed25519 AAAA...'   # from /etc/ssh/ssh_host_ed25519_key.pub"
        raise


def _wrong(name: str, problems: tuple[Problem, ...]) -> ConfigError:
    return ConfigError(
        f"the assignment {name} makes no sense like this",
        tuple(Problem(one.path, 0, one.message) for one in problems),
        hint="labctl receive assignment --help",
    )


def program_words() -> list[str]:
    """How a forced command finds this labctl."""
    found = shutil.which("labctl")
    return [found] if found else [sys.executable, "-P", "-m", "labctl"]


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def _replace(file: Path, lines: list[str]) -> None:
    """The whole file at once, for its owner alone."""
    file = Path(os.path.realpath(file))
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = "".join(f"{line}\n" for line in lines)
    write_draft(file, text.encode(), mode=0o600).replace(file)
