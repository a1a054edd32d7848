"""Open the database: its schema, its file modes, and the replacement of a damaged one."""

from __future__ import annotations

import os
import re
import sqlite3
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from labctl.errors import BusyError, DiskFullError, LabError
from labctl.lazy import lazy_imports
from labctl.state.locks import hold_lock

with lazy_imports(__name__):
    import subprocess

SCHEMA_VERSION = 2
BUSY_TIMEOUT_S = 10.0
# A larger database is checked completely only if its size looks wrong, since that takes long.
MAX_CHECKED_BYTES = 8 * 2**20

_SCHEMA = """
CREATE TABLE servers (
    id TEXT PRIMARY KEY, lab_id TEXT NOT NULL, provider TEXT NOT NULL, alias TEXT NOT NULL,
    state TEXT NOT NULL, created_at REAL NOT NULL, json TEXT NOT NULL
);
CREATE INDEX servers_of_lab ON servers (lab_id, created_at);
CREATE TABLE attempts (
    token TEXT PRIMARY KEY, lab_id TEXT NOT NULL, provider TEXT NOT NULL, created_at REAL NOT NULL,
    outcome TEXT NOT NULL DEFAULT '', request TEXT NOT NULL, offer TEXT NOT NULL,
    account TEXT NOT NULL DEFAULT ''
);
CREATE INDEX attempts_of_lab ON attempts (lab_id, outcome);
CREATE TABLE runs (
    lab_id TEXT NOT NULL, id TEXT NOT NULL, server_id TEXT NOT NULL, created_at REAL NOT NULL,
    json TEXT NOT NULL, PRIMARY KEY (lab_id, id)
);
CREATE INDEX runs_by_age ON runs (lab_id, created_at);
CREATE TABLE forwards (id TEXT PRIMARY KEY, server_id TEXT NOT NULL, json TEXT NOT NULL);
CREATE TABLE events (
    number INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, kind TEXT NOT NULL,
    lab_id TEXT NOT NULL, server_id TEXT NOT NULL, run_id TEXT NOT NULL, detail TEXT NOT NULL
);
CREATE INDEX events_of_lab ON events (lab_id, number);
CREATE TRIGGER events_keep BEFORE UPDATE ON events
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER events_stay BEFORE DELETE ON events
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
"""
# Schema version -> the statements that migrate it to the next one. An older labctl that still has
# the file open continues to work: it names the columns that it writes and reads.
_MIGRATIONS = {1: ("ALTER TABLE attempts ADD COLUMN account TEXT NOT NULL DEFAULT ''",)}
# `INSERT OR REPLACE` deletes without firing the trigger above unless recursive_triggers is on.
_ON_OPEN = ("PRAGMA recursive_triggers = ON", "PRAGMA synchronous = FULL")

# WAL needs memory that all processes with the file open share; these file systems do not have it.
_NETWORK_FILESYSTEMS = ("nfs", "cifs", "smb", "fuse", "afs", "afp", "9p", "lustre", "ceph", "drvfs")
_SUFFIXES = ("", "-wal", "-shm", "-journal")


class _UnusableError(Exception):
    """The file is not a database of this version of labctl; the message says why."""


def open_database(path: Path, *, network: bool | None = None) -> tuple[sqlite3.Connection, str]:
    """Open the database at `path`; create or replace it if needed. Returns why it was replaced.

    An unusable file is moved to `<name>.broken-<time>`. Only one process at a time does this.
    """
    try:
        if path.exists():
            with suppress(_UnusableError):
                return _open_current(path), ""
        else:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = path.parent / "locks" / "database.lock"
        with hold_lock(lock, "opening the database", wait_s=30.0, is_command=False):
            return _create(path, network)
    except OSError as error:
        raise LabError(
            f"cannot write {path}",
            why=error.strerror or "",
            hint="export LABCTL_STATE_DIR=DIR   # a directory that you can write to",
        ) from error


def open_to_read(path: Path) -> tuple[sqlite3.Connection, str]:
    """Open the database for reading. An unusable one reads as empty; also returns why, or ""."""
    why = ""
    if path.exists():
        try:
            db = _open_checked(path, fix_modes=False)
        except _UnusableError as error:
            why = str(error)
        else:
            with translate_errors(path):
                db = _migrate_copy(db)
            db.execute("PRAGMA query_only = ON")
            return db, ""
    db = _connect(":memory:")
    db.executescript(_SCHEMA)
    db.execute("PRAGMA query_only = ON")
    return db, why


@contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Turn errors of SQLite into labctl's own."""
    try:
        yield
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        # Python raises UnicodeDecodeError for text on a damaged page.
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise BusyError(
                "another labctl is using the database",
                why=f"waited {BUSY_TIMEOUT_S:.0f} s for {path}",
                hint="try again in a moment",
            ) from error
        if code == sqlite3.SQLITE_FULL:
            raise DiskFullError(
                f"no space left to write {path}", why=str(error), hint=f"df -h {path.parent}"
            ) from error
        raise LabError(
            f"the database {path} cannot be used",
            why=str(error),
            hint=f"mv {path} {path}.broken\nlabctl status --refresh",
        ) from error


def _create(path: Path, network: bool | None) -> tuple[sqlite3.Connection, str]:
    """Create the database, unless another process has created it meanwhile. Needs the lock."""
    why = ""
    if path.exists():
        try:
            return _open_current(path), ""
        except _UnusableError as error:
            why = str(error)
        aside = path.with_name(f"{path.name}.broken-{time.time():.3f}")
        for suffix in _SUFFIXES:
            with suppress(FileNotFoundError):
                Path(f"{path}{suffix}").replace(f"{aside}{suffix}")
        why = f"{why}; the old file is {aside}"
    # Built under another name, so that no process ever sees a database without tables. A log left
    # by a deleted database would be applied to the new one.
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    _delete(path)
    _delete(draft)
    try:
        with translate_errors(path):
            _write_new(draft, is_on_network(path.parent) if network is None else network)
        draft.replace(path)
    finally:
        _delete(draft)
    return _open_checked(path), why


def _write_new(file: Path, on_network: bool) -> None:
    """Write a new database with its tables; it is complete when this returns."""
    os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    db = _connect(str(file))
    with closing(db):
        db.executescript(
            f"BEGIN;{_SCHEMA}PRAGMA user_version = {SCHEMA_VERSION};COMMIT;"
            f"PRAGMA journal_mode = {'DELETE' if on_network else 'WAL'};"
        )


def _delete(file: Path) -> None:
    """Delete a database file and its logs."""
    for suffix in _SUFFIXES:
        Path(f"{file}{suffix}").unlink(missing_ok=True)


def _open_current(path: Path) -> sqlite3.Connection:
    """Open the database, and migrate it to this version if an older labctl wrote it."""
    db = _open_checked(path)
    with _close_on_error(db), translate_errors(path):
        _migrate(db)
    return db


def _migrate(db: sqlite3.Connection) -> None:
    """Bring the schema up to date, all or nothing; other processes may do the same."""
    if _read_version(db) == SCHEMA_VERSION:
        return
    db.execute("BEGIN IMMEDIATE")
    try:
        for version in range(_read_version(db), SCHEMA_VERSION):
            for statement in _MIGRATIONS[version]:
                db.execute(statement)
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        db.execute("COMMIT")
    except BaseException:
        db.rollback()
        raise


def _migrate_copy(db: sqlite3.Connection) -> sqlite3.Connection:
    """Return the database itself or, if its schema is older, a migrated copy in memory."""
    if _read_version(db) == SCHEMA_VERSION:
        return db
    copy = _connect(":memory:")
    with closing(db), _close_on_error(copy):
        db.backup(copy)
        _migrate(copy)
    return copy


def _read_version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def _open_checked(path: Path, *, fix_modes: bool = True) -> sqlite3.Connection:
    """Open an undamaged database of this version or an older one.

    _UnusableError for anything else.
    """
    try:
        status = path.stat()
    except FileNotFoundError as error:
        # Another process is just moving it aside.
        raise _UnusableError("the database was gone") from error
    if not stat.S_ISREG(status.st_mode):
        raise LabError(f"{path} is not a file", hint="export LABCTL_STATE_DIR=DIR")
    if status.st_size == 0:
        raise _UnusableError("the database was empty")
    if fix_modes and stat.S_IMODE(status.st_mode) & 0o077:
        path.chmod(0o600)
    has_log = any(_size(f"{path}{suffix}") for suffix in ("-wal", "-journal"))
    try:
        with translate_errors(path):
            db = _connect(f"{path.absolute().as_uri()}?mode=rw", uri=True)
            with _close_on_error(db):
                _check(db, status.st_size, has_log)
    except LabError as error:
        cause = error.__cause__
        if cause is not None and _is_damage(cause):
            raise _UnusableError(f"the database was damaged: {cause}") from error
        if not path.exists():
            raise _UnusableError("the database was gone") from error
        raise
    return db


def _is_damage(error: BaseException) -> bool:
    if isinstance(error, UnicodeDecodeError):
        return True
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    damage = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
    return code in damage


def _size(name: str) -> int:
    try:
        return Path(name).stat().st_size
    except FileNotFoundError:
        return 0


def _check(db: sqlite3.Connection, size: int, has_log: bool) -> None:
    """Raise _UnusableError, or an error of SQLite, unless this is a complete labctl database.

    `size` is the file's size before it was opened; `has_log`: a log had a part of its data then.
    """
    version = _read_version(db)
    if version > SCHEMA_VERSION:
        raise _UnusableError(
            f"the database was of a newer labctl (schema {version}; here {SCHEMA_VERSION})"
        )
    if version < min(_MIGRATIONS):
        raise _UnusableError("the database was not labctl's")
    # SQLite notices missing pages, but reads the missing part of an incomplete page as zeros. With
    # a log this is not damage: a crash while the log is merged leaves such a file.
    excess = size % db.execute("PRAGMA page_size").fetchone()[0]
    if excess and not has_log:
        raise _UnusableError("the database was cut short")
    if size <= MAX_CHECKED_BYTES or excess:
        result = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if result != "ok":
            raise _UnusableError(f"the database was damaged: {result.splitlines()[-1]}")


def _connect(name: str, *, uri: bool = False) -> sqlite3.Connection:
    db = sqlite3.connect(
        name, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, uri=uri
    )
    with _close_on_error(db):
        for pragma in _ON_OPEN:
            db.execute(pragma)
    return db


@contextmanager
def _close_on_error(db: sqlite3.Connection) -> Iterator[None]:
    try:
        yield
    except BaseException:
        db.close()
        raise


def is_on_network(directory: Path) -> bool:
    """Whether `directory` is on NFS or another file system that several machines share."""
    return find_filesystem(directory.resolve(), _read_mounts()).startswith(_NETWORK_FILESYSTEMS)


def find_filesystem(path: Path, mounts: dict[str, str]) -> str:
    """Return the type of the file system of `path`; `mounts` is mount point -> type."""
    for folder in (path, *path.parents):
        if str(folder) in mounts:
            return mounts[str(folder)]
    return ""


def _read_mounts() -> dict[str, str]:
    if sys.platform == "linux":
        with suppress(OSError):
            return parse_linux_mounts(Path("/proc/self/mounts").read_text(errors="surrogateescape"))
        return {}
    with suppress(OSError, subprocess.SubprocessError):
        result = subprocess.run(["mount"], capture_output=True, text=True, timeout=5, check=True)
        return parse_bsd_mounts(result.stdout)
    return {}


def parse_linux_mounts(text: str) -> dict[str, str]:
    """Parse /proc/self/mounts: mount point -> type; the last mount on a point is visible."""
    mounts = {}
    for line in text.splitlines():
        words = line.split(" ")
        if len(words) >= 3:
            point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), words[1])
            mounts[point] = words[2]
    return mounts


def parse_bsd_mounts(text: str) -> dict[str, str]:
    """Parse `mount` on macOS (`SOURCE on POINT (TYPE, ...)`): mount point -> type."""
    matches = (re.fullmatch(r".*? on (.*) \(([^,)]+).*", line) for line in text.splitlines())
    return {match[1]: match[2] for match in matches if match}
