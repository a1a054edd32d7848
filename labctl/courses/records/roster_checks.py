"""What a row of a roster must be like: ids, names, addresses, and no two the same."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from labctl.config.course_schema import parse_email
from labctl.config.document import shown
from labctl.courses.records.student import Student
from labctl.errors import Problem
from labctl.model import NAME_PATTERN

MAX_NAME = 200
# Invisible, and part of how some names are written.
JOINERS = "\u200c\u200d"
_LOGIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}")


def id_problem(text: str) -> str:
    """What is wrong with an id that was written as one; "" where nothing is."""
    if NAME_PATTERN.fullmatch(text):
        return ""
    if not text:
        return "an id is missing"
    near = derived(text)
    said = f"{shown(text)} is not an id: small letters, digits and `-`, at most 39"
    return f"{said}; try {near}" if near and not text.startswith("-") else said


def login_problem(text: str) -> str:
    """What is wrong with a login that an id is to be made of."""
    if not text or _LOGIN.fullmatch(text):
        return ""
    return f"{shown(text)} is not a login: letters, digits and . _ @ + -"


def name_problem(text: str) -> str:
    if len(text) > MAX_NAME:
        return f"a name of {len(text)} characters: at most {MAX_NAME}"
    if not all(one.isprintable() or one in JOINERS for one in text):
        return f"{shown(text)}: a character that cannot be printed, in a name"
    return ""


def email_problem(text: str) -> str:
    try:
        return "" if not text else parse_email(text) and ""
    except ValueError as error:
        return str(error)


def derived(text: str) -> str:
    """An id made of a login, an address or a name: `Müller, Ann` gives mueller-ann; "" for none."""
    local = text.partition("@")[0] if "@" in text else text
    for letter, plain in {"ä": "ae", "ö": "oe", "ü": "ue", "ß": "ss", "ø": "o", "ł": "l"}.items():
        local = local.replace(letter, plain).replace(letter.upper(), plain)
    folded = unicodedata.normalize("NFKD", local).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", folded).strip("-")[:39].rstrip("-")


def across(students: Sequence[Student], lines: Sequence[int], problems: list[Problem]) -> None:
    """Ids and addresses that stand twice, and teams that are called as somebody else is."""
    for what in ("id", "email"):
        seen: dict[str, int] = {}
        for student, line in zip(students, lines, strict=True):
            value = getattr(student, what).casefold()
            if value and value in seen:
                place = f"stands on line {seen[value]}" if seen[value] else "is in the roster"
                said = f"the {what} {shown(value)} {place} already"
                problems.append(Problem("", line, said))
            seen.setdefault(value, line)
    teams = {one.id: one.team for one in students}
    for student, line in zip(students, lines, strict=True):
        if student.team in teams and teams[student.team] != student.team:
            said = f"the team {student.team} is called as a student is who is not in it"
            problems.append(Problem("", line, said))
