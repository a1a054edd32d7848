"""The code of a join file: its key pair, and what it opens besides the enrollment of a key.

The code signs its student in to the course's page for students (`labctl.web`), where it is their
password: it stays valid there after `labctl join`, until the next invitation or until the student
leaves. A code that nothing has used before the join file expired opens nothing.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection
from pathlib import Path

import msgspec

from labctl.config.identity import write_private
from labctl.courses.keys import keeper_dir
from labctl.courses.records.folder import CourseFolder
from labctl.decoding import decode_json
from labctl.lazy import lazy_imports
from labctl.model import NAME_PATTERN, Value

with lazy_imports(__name__):
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ed25519

# characters of a code, which is lowercase letters and digits
SHORTEST, LONGEST = 16, 64


class PageCode(Value, frozen=True):
    """The record of a student's present code, which never holds the code itself.

    `public` is the public key derived from it. `expires` (Unix time) ends a code that was not
    `used`.
    """

    public: str
    expires: int
    used: bool = False


def derive_key_pair(course_id: str, student: str, code: str) -> tuple[bytes, str]:
    """Derive the code's key pair: the private key in OpenSSH's format, and the public line."""
    message = f"labctl join 1 {course_id} {student}".encode()
    seed = hmac.new(code.encode(), message, hashlib.sha256).digest()
    private = ed25519.Ed25519PrivateKey.from_private_bytes(seed)
    text = private.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    return text, _public_line(private)


def make_unusable_key() -> str:
    """Return a new public key whose private half is discarded, so that nobody can log in with it.

    A student without labctl needs no key on the server, but each lab that holds it names one.
    """
    return _public_line(ed25519.Ed25519PrivateKey.generate())


def store_page_code(folder: CourseFolder, student: str, public: str, expires: int) -> None:
    """Let this code sign the student in; it replaces the one before, whose sessions end."""
    _write(folder, student, PageCode(public=public, expires=expires))


def mark_page_code_used(folder: CourseFolder, student: str) -> None:
    """Record that the code was used, so that it does not expire with its join file."""
    record = read_page_code(folder, student)
    if record is not None and not record.used:
        _write(folder, student, msgspec.structs.replace(record, used=True))


def read_page_code(folder: CourseFolder, student: str) -> PageCode | None:
    """Return a student's present code, or None without one."""
    if not NAME_PATTERN.fullmatch(student):
        return None
    try:
        return decode_json(_record_path(folder, student).read_bytes(), PageCode)
    except (OSError, msgspec.MsgspecError):
        return None


def is_page_code(folder: CourseFolder, student: str, code: str, now: float) -> bool:
    """Tell whether this code signs the student in now.

    It takes the same time for a student who has no code.
    """
    record = read_page_code(folder, student)
    is_code = SHORTEST <= len(code) <= LONGEST and code.isascii()
    public = derive_key_pair(folder.id, student, code)[1] if is_code else ""
    known = record.public if record is not None else ""
    is_same = hmac.compare_digest(public.encode(), known.encode())
    return record is not None and is_same and (record.used or now <= record.expires)


def list_page_users(folder: CourseFolder) -> list[str]:
    """List the students who have used their present code."""
    names = [path.stem for path in page_codes_dir(folder).glob("[!.]*.json")]
    records = {name: read_page_code(folder, name) for name in names}
    return sorted(name for name, record in records.items() if record is not None and record.used)


def withdraw_page_codes(folder: CourseFolder, active: Collection[str]) -> None:
    """Delete all codes but those of active students."""
    for path in page_codes_dir(folder).glob("[!.]*.json"):
        if path.stem not in active:
            path.unlink(missing_ok=True)


def page_codes_dir(folder: CourseFolder) -> Path:
    return keeper_dir(folder) / "page-codes"


def _write(folder: CourseFolder, student: str, record: PageCode) -> None:
    page_codes_dir(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(_record_path(folder, student), msgspec.json.encode(record))


def _record_path(folder: CourseFolder, student: str) -> Path:
    return page_codes_dir(folder) / f"{student}.json"


def _public_line(private: ed25519.Ed25519PrivateKey) -> str:
    public = private.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return public.decode()
