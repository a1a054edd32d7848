"""The instructor's side: assignment files, students' keys, tickets for a bucket."""

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
from labctl.errors import ConfigError, PolicyError, Problem, UsageError
from labctl.lazy import lazy_imports
from labctl.model import Endpoint
from labctl.submissions.assignment import (
    SSH_PLACE,
    Assignment,
    DeadlineStatus,
    assignment_text,
    parse_assignment,
)
from labctl.submissions.buckets import LONGEST_S, Bucket
from labctl.submissions.collect import CollectedPost, collect_bucket
from labctl.submissions.receiver import Receiver, check_name

with lazy_imports(__name__):
    from labctl.transports import fabric_login

KEY_LINE = re.compile(
    r"(ssh-ed25519|ecdsa-sha2-nistp(?:256|384|521)|ssh-rsa|sk-ssh-ed25519@openssh\.com) "
    r"([A-Za-z0-9+/]{60,2000}={0,2})(?: .*)?"
)
# The comment of a student's line in authorized_keys.
MARK = "labctl-submit:"


def write_assignment(
    receiver: Receiver, name: str, place: str, options: Mapping[str, object]
) -> str:
    """Write an assignment's file into the receiver's directory, and return its text.

    `options` has due, late, penalty, max_size, require, host_key and course as typed. A due time in
    a named time zone is written with its offset, so that other machines need not know the zone.
    ConfigError for invalid values, ConnectError if the host key is needed and cannot be read.
    """
    due, zone = str(options.get("due") or ""), ""
    if due:
        try:
            moment = parse_moment(due)
            due, zone = str(moment), moment.zone
        except ValueError as error:
            raise _make_invalid_error(name, (Problem("due", 0, str(error)),)) from None
    host_key = " ".join(str(options.get("host_key") or "").split()[:2])  # without its comment
    if place.startswith("ssh://") and not host_key:
        host_key = _read_host_key(place)
    require = options.get("require") or ("model",)
    assert isinstance(require, tuple | list)
    lines = {
        "assignment": check_name(name),
        "course": str(options.get("course") or ""),
        "due": due,
        "zone": zone,
        "late": str(options.get("late") or "never"),
        "penalty": str(options.get("penalty") or "0"),
        "max_size": str(options.get("max_size") or "500MB"),
        "require": [str(part) for part in require],
        "hand_in": place,
        "host_key": host_key,
        "receiver": receiver.read_public_key(),
    }
    problems: list[Problem] = []
    body = msgspec.json.encode({key: value for key, value in lines.items() if value})
    assignment = parse_assignment(body, problems)
    if assignment is None:
        raise _make_invalid_error(name, tuple(problems))
    text = assignment_text(assignment)
    file = receiver.assignment_file(name)
    write_draft(file, text.encode(), mode=0o600).replace(file)
    return text


def extend(receiver: Receiver, name: str, student: str, text: str) -> DeadlineStatus:
    """Extend a student's due time; return their standing."""
    try:
        seconds = 0 if text == "0" else parse_duration(text)
    except ValueError as error:
        raise UsageError(str(error), hint="labctl receive extend DIR hw3 alice 3d") from None
    receiver.extend(name, student, seconds)
    return receiver.standing(name, student)


def admit(receiver: Receiver, student: str, key: str, file: Path) -> str:
    """Authorize a student's public key for submitting under their name only; return its line.

    It replaces the student's previous key. UsageError if it is not a public key, PolicyError if
    another student has it.
    """
    match = KEY_LINE.fullmatch(key.strip())
    if match is None:
        raise UsageError(
            "this is not a public key",
            why="expected one line, as `labctl submit --key` prints it: ssh-ed25519 AAAA...",
            hint="labctl submit --key   # on the student's machine",
        )
    receiver.read_public_key()
    words = [*labctl_argv(), "receive", "serve", str(receiver.directory), check_name(student)]
    command = shlex.join(words)
    if re.search(r'["\\\n]', command):
        raise UsageError(
            f"the path {receiver.directory} cannot be written into authorized_keys",
            why="it contains quotes, backslashes or line breaks",
            hint="labctl receive init ~/drop   # a path of letters, digits and /._-",
        )
    line = f'restrict,command="{command}" {match[1]} {match[2]} {MARK}{student}'
    others = [other for other in _read_lines(file) if not other.endswith(f" {MARK}{student}")]
    if any(f" {match[2]} " in f"{other} " for other in others):
        raise PolicyError(
            "this key already belongs to another student",
            why="sshd uses the first line that has it",
            hint=f"see {file}",
        )
    _replace_lines(file, [*others, line])
    return line


def expel(student: str, file: Path) -> bool:
    """Remove a student's line; return whether there was one."""
    lines = _read_lines(file)
    others = [line for line in lines if not line.endswith(f" {MARK}{check_name(student)}")]
    if len(others) < len(lines):
        _replace_lines(file, others)
    return len(others) < len(lines)


def write_tickets(
    receiver: Receiver,
    name: str,
    students: Iterable[str],
    valid: str,
    into: Path,
    profile: str = "",
) -> list[Path]:
    """Write each student's assignment file with a ticket for the bucket (0600)."""
    rules = receiver.load_rules(name)
    try:
        valid_s = parse_duration(valid)
    except ValueError as error:
        raise UsageError(str(error), hint="--valid 7d") from None
    if valid_s > LONGEST_S:
        raise UsageError(
            f"--valid {valid} is too long",
            why="S3 accepts a signature for at most 7 days",
            hint="labctl receive ticket ~/drop hw3 alice --valid 7d",
        )
    bucket = Bucket(_bucket_url(rules), profile)
    bucket.check_versioned()
    into.mkdir(parents=True, exist_ok=True)
    written = []
    for student in students:
        ticket = bucket.create_ticket(rules, check_name(student), valid_s)
        own = msgspec.structs.replace(rules, student=student, ticket=ticket)
        path = into / f"{name}-{student}.yaml"
        write_draft(path, assignment_text(own).encode(), mode=0o600).replace(path)
        written.append(path)
    return written


def collect_posts(receiver: Receiver, name: str, profile: str = "") -> list[CollectedPost]:
    """Collect the posts in the assignment's bucket."""
    bucket = Bucket(_bucket_url(receiver.load_rules(name)), profile)
    return collect_bucket(receiver, bucket, name)


def _bucket_url(rules: Assignment) -> str:
    if not rules.hand_in.startswith("s3://"):
        raise UsageError(
            f"{rules.name} is not submitted through a bucket",
            why=f"it goes to {rules.hand_in}: authorize students with `labctl receive admit`",
            hint="labctl receive admit ~/drop alice alice.pub",
        )
    return rules.hand_in


def _read_host_key(place: str) -> str:
    """Read the host key that the SSH server shows to this machine."""
    match = SSH_PLACE.fullmatch(place)
    if match is None:
        return ""
    port = int(match["port"] or 22)
    return fabric_login.fetch_host_key(Endpoint(host=match["host"], port=port, user=match["user"]))


def _make_invalid_error(name: str, problems: tuple[Problem, ...]) -> ConfigError:
    keys = ("course", "due", "host_key", "late", "max_size", "penalty", "require")
    typed = {"hand_in": "--at", **{key: f"--{key.replace('_', '-')}" for key in keys}}
    return ConfigError(
        f"the assignment {name} is not valid",
        tuple(Problem(typed.get(one.path, one.path), 0, one.message) for one in problems),
        hint="labctl receive assignment --help",
    )


def labctl_argv() -> list[str]:
    """Return the words with which a forced command starts this labctl."""
    program = shutil.which("labctl")
    return [program] if program else [sys.executable, "-P", "-m", "labctl"]


def _read_lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def _replace_lines(file: Path, lines: list[str]) -> None:
    """Replace the file atomically, readable only by its owner."""
    file = Path(os.path.realpath(file))
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = "".join(f"{line}\n" for line in lines)
    write_draft(file, text.encode(), mode=0o600).replace(file)
