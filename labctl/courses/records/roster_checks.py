"""Checks of a roster's rows: ids, names and mail addresses, and that none occurs twice."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from labctl.config.course_schema import parse_email
from labctl.config.document import quote
from labctl.courses.records.student import Student
from labctl.errors import Problem
from labctl.model import NAME_PATTERN

MAX_NAME = 200
# Invisible characters that are part of some names.
JOINERS = "\u200c\u200d"
_LOGIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}")


def id_problem(text: str) -> str:
    """Return what is wrong with an id, or "" if nothing is."""
    if NAME_PATTERN.fullmatch(text):
        return ""
    if not text:
        return "an id is missing"
    near = derive_id(text)
    message = f"{quote(text)} is not an id: use up to 39 lowercase letters, digits and `-`"
    return f"{message}; try {near}" if near and not text.startswith("-") else message


def login_problem(text: str) -> str:
    """Return what is wrong with a login from which an id is derived, or ""."""
    if not text or _LOGIN.fullmatch(text):
        return ""
    return f"{quote(text)} is not a login: use letters, digits and . _ @ + -"


def name_problem(text: str) -> str:
    """Return what is wrong with a name, or "" if nothing is."""
    if len(text) > MAX_NAME:
        return f"a name has {len(text)} characters, at most {MAX_NAME} are allowed"
    if not all(character.isprintable() or character in JOINERS for character in text):
        return f"the name {quote(text)} has an unprintable character"
    return ""


def email_problem(text: str) -> str:
    """Return what is wrong with a mail address, or "" if nothing is."""
    try:
        return "" if not text else parse_email(text) and ""
    except ValueError as error:
        return str(error)


def derive_id(text: str) -> str:
    """Derive an id from a login, an address or a name, "" if none is possible.

    `Müller, Ann` gives mueller-ann.
    """
    local = text.partition("@")[0] if "@" in text else text
    for letter, plain in {"ä": "ae", "ö": "oe", "ü": "ue", "ß": "ss", "ø": "o", "ł": "l"}.items():
        local = local.replace(letter, plain).replace(letter.upper(), plain)
    folded = unicodedata.normalize("NFKD", local).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", folded).strip("-")[:39].rstrip("-")


def check_duplicates(
    students: Sequence[Student], lines: Sequence[int], problems: list[Problem]
) -> None:
    """Report ids and addresses that occur twice, and teams with the id of another student."""
    for field in ("id", "email"):
        line_of: dict[str, int] = {}
        for student, line in zip(students, lines, strict=True):
            value = getattr(student, field).casefold()
            if value and value in line_of:
                place = f"on line {line_of[value]}" if line_of[value] else "in the roster"
                message = f"the {field} {quote(value)} is already {place}"
                problems.append(Problem("", line, message))
            line_of.setdefault(value, line)
    teams = {student.id: student.team for student in students}
    for student, line in zip(students, lines, strict=True):
        if student.team in teams and teams[student.team] != student.team:
            message = f"the team {student.team} has the id of a student outside it"
            problems.append(Problem("", line, message))
