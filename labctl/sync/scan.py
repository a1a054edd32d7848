"""List the files of a lab and their hashes, after its ignore rules.

Links are never followed. Hashes are kept in `<lab>/.labctl/index.json` by size, times and inode,
so that a scan reads only files that changed.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from labctl.decoding import decode_json
from labctl.errors import NotFoundError, UsageError
from labctl.events import Note, Progress, Reporter
from labctl.model import FileEntry
from labctl.sync.ignore import (
    ENVIRONMENT_MARKS,
    IGNORE_FILES,
    NEVER_ANYWHERE,
    NEVER_AT_TOP,
    Ignore,
    IgnoredName,
    find_rule,
    read_rules,
)
from labctl.text import names_text

# A file written this recently may be written again without its time changing: not cached.
RACY_S = 2.0
NAMED_AT_MOST = 5
SMALL_BYTES = 256 * 1024
# Files of at least this size are hashed during their transfer.
LARGE_BYTES = 32 * 1024**2
MANY_FILES = 1000
# bytes between two progress reports
REPORT_BYTES = 4 * 1024**2
Found = tuple[str, os.stat_result]
# Size, mtime_ns, inode, ctime_ns and the hash of the file that had them.
Entry = tuple[int, int, int, int, str]
# Trees are pushed side by side, and one file has the sections of all. The transfer lock excludes
# other processes.
_saving = threading.Lock()


class HashIndex:
    """Hashes of files, stored between calls. A lost index only costs time."""

    def __init__(self, lab_root: Path, section: str) -> None:
        self._path = lab_root / ".labctl" / "index.json"
        self._section = section
        self._known = _read_index(self._path).get(section, {})
        self._fresh: dict[str, Entry] = {}
        # Names of the files that `hash` had to read.
        self.read: set[str] = set()

    def lookup(self, name: str, status: os.stat_result) -> str:
        """Return the stored hash of the file that `status` describes, "" if it must be read."""
        entry = self._fresh.get(name) or self._known.get(name)
        if entry is None or entry[:4] != file_identity(status):
            return ""
        self._fresh[name] = entry
        return entry[4]

    def hash_and_stat(self, name: str, path: Path) -> tuple[str, os.stat_result]:
        """Return the file's hash and the stat it belongs to; read it only if needed."""
        status = path.stat(follow_symlinks=False)
        sha256 = self.lookup(name, status)
        if sha256:
            return sha256, status
        sha256 = hash_file(path)
        self.read.add(name)
        self.store_settled(name, status, sha256)
        return sha256, status

    def store_settled(self, name: str, status: os.stat_result, sha256: str) -> None:
        """Store a hash unless the file is so new that it may change without a new time."""
        if time.time() - status.st_mtime > RACY_S:
            self.store(name, status, sha256)

    def store(self, name: str, status: os.stat_result, sha256: str) -> None:
        """Store the hash of the file that `status` describes."""
        self._fresh[name] = (*file_identity(status), sha256)

    def save(self, *, keep: bool = False) -> None:
        """Write the entries used since loading; with `keep`, also those that were not used."""
        entries = {**self._known, **self._fresh} if keep else self._fresh
        if entries == self._known:
            return
        self._known = dict(entries)
        self._path.parent.mkdir(exist_ok=True)
        with _saving:
            sections = {**_read_index(self._path), self._section: entries}
            staging = self._path.with_name(f".index.{secrets.token_hex(4)}")
            staging.write_bytes(msgspec.json.encode(sections))
            staging.replace(self._path)


def _read_index(path: Path) -> dict[str, dict[str, Entry]]:
    try:
        return decode_json(path.read_bytes(), dict[str, dict[str, Entry]])
    except (OSError, msgspec.DecodeError):
        return {}


def file_identity(status: os.stat_result) -> tuple[int, int, int, int]:
    """Return what changes whenever a file's contents change."""
    return status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns


def hash_file(path: Path) -> str:
    """Hash a file; sha256 in hex."""
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size < SMALL_BYTES:  # one read is faster than file_digest, which makes a large buffer
            content = file.read(size + 1)
            if len(content) == size:
                return hashlib.sha256(content).hexdigest()
            file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()


def scan_code(
    lab_root: Path,
    reporter: Reporter,
    *,
    data: Iterable[Path] = (),
    later: HashIndex | None = None,
    ignored: list[IgnoredName] | None = None,
) -> tuple[FileEntry, ...]:
    """List the lab's code by name, without ignored files, environments of packages and `data`.

    With `later`, the index to use, new large files get no `sha256`, and in a large first scan no
    file does: `push` hashes them during the transfer. What a rule leaves out is added to `ignored`.

    UsageError for names with control characters; a warning for links and names that are not UTF-8.
    """
    root = lab_root.resolve()
    excluded = frozenset(path.resolve() for path in data)
    index = later or HashIndex(root, "code")
    walk = _Walk(root, excluded, code=True, ignored=ignored)
    return _scan(root, index, reporter, walk, later=later is not None)


def scan_data(
    lab_root: Path,
    name: str,
    directory: Path,
    reporter: Reporter,
    *,
    later: HashIndex | None = None,
) -> tuple[FileEntry, ...]:
    """List the files of a data set by name. Ignore rules do not apply; links are left out.

    `later` as in `scan_code`.
    """
    if not directory.is_dir():
        raise NotFoundError(
            f"the data set {name} does not exist: {directory} is not a directory",
            hint=f"fix data.{name} in lab.yaml",
        )
    index = later or HashIndex(lab_root.resolve(), f"data/{name}")
    root = directory.resolve()
    walk = _Walk(root, frozenset(), code=False)
    return _scan(root, index, reporter, walk, later=later is not None)


def rehash(
    root: Path,
    files: Sequence[FileEntry],
    changed: set[str],
    reporter: Reporter,
    index: HashIndex | None,
) -> tuple[FileEntry, ...]:
    """Return `files` with the `changed` ones hashed again, without deleted ones."""
    kept = []
    done, total = 0, sum(entry.size for entry in files if entry.path in changed)
    for entry in files:
        if entry.path in changed:
            path = root / entry.path
            try:
                status = path.stat(follow_symlinks=False)
                if not stat.S_ISREG(status.st_mode):
                    continue
                sha256 = hash_file(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            if index:
                index.store_settled(entry.path, status, sha256)
            done += entry.size
            reporter.emit(Progress(name="hash", done=done, total=total, unit="bytes"))
            entry = _entry(entry.path, status, sha256)
        kept.append(entry)
    return tuple(kept)


def _scan(
    root: Path, index: HashIndex, reporter: Reporter, walk: _Walk, *, later: bool
) -> tuple[FileEntry, ...]:
    entries = sorted(walk.files())
    walk.report_skipped(reporter)
    hashes = [index.lookup(name, status) for name, status in entries]
    limit = _choose_hash_limit(entries, hashes) if later else sys.maxsize
    pairs = zip(entries, hashes, strict=True)
    unread = sum(s.st_size for (_, s), sha256 in pairs if not sha256 and s.st_size < limit)
    files: list[FileEntry] = []
    done = reported = 0
    for (name, status), sha256 in zip(entries, hashes, strict=True):
        if not sha256 and status.st_size < limit:
            try:
                sha256, status = index.hash_and_stat(name, root / name)
            except FileNotFoundError:
                continue
            done += status.st_size
            if done - reported >= REPORT_BYTES or done >= unread:
                reported = done
                reporter.emit(Progress(name="hash", done=done, total=unread, unit="bytes"))
        files.append(_entry(name, status, sha256))
    index.save()
    return tuple(files)


def _choose_hash_limit(entries: list[Found], hashes: list[str]) -> int:
    """Return the size in bytes from which files without a hash are hashed during their transfer.

    That is 0 for a large first push. A later push hashes changed files before: the server has files
    of these names, and would have to ask for their hashes.
    """
    is_large = (
        len(entries) >= MANY_FILES or sum(status.st_size for _, status in entries) >= LARGE_BYTES
    )
    return 0 if is_large and not any(hashes) else LARGE_BYTES


def _entry(name: str, status: os.stat_result, sha256: str) -> FileEntry:
    mode = 0o755 if status.st_mode & 0o100 else 0o644
    return FileEntry(
        path=name, size=status.st_size, sha256=sha256, mode=mode, mtime_ns=status.st_mtime_ns
    )


class _Walk:
    """One walk through a tree: lists its files, and remembers what it left out and why."""

    def __init__(
        self,
        root: Path,
        excluded: frozenset[Path],
        *,
        code: bool,
        ignored: list[IgnoredName] | None = None,
    ) -> None:
        self._root = root
        self._excluded = excluded
        self._code = code
        self._ignored = [] if ignored is None else ignored
        self._links: list[str] = []
        self._environments: list[str] = []
        self._odd: list[str] = []
        self._bad_rules: list[str] = []

    def files(self) -> Iterator[Found]:
        """Yield (path relative to the root, stat) of each regular file that is not left out."""
        return self._walk("", ())

    def _walk(self, prefix: str, ignore: Ignore) -> Iterator[Found]:
        with os.scandir(self._root / prefix) as listing:
            entries = list(listing)
        if self._code and prefix and any(e.name in ENVIRONMENT_MARKS for e in entries):
            self._environments.append(prefix[:-1])
            return
        if self._code:
            ignore = self._read_rules(prefix, entries, ignore)
        for entry in entries:
            name = prefix + entry.name
            if self._is_excluded(name, entry, ignore):
                continue
            if entry.is_symlink():
                self._links.append(name)
            elif entry.is_dir():
                yield from self._walk(name + "/", ignore)
            elif entry.is_file():
                yield name, entry.stat(follow_symlinks=False)

    def _is_excluded(self, name: str, entry: os.DirEntry[str], ignore: Ignore) -> bool:
        if self._code and (entry.name in NEVER_ANYWHERE or name in NEVER_AT_TOP):
            return True
        is_folder = entry.is_dir(follow_symlinks=False)
        # Before the rules: a data directory is sent as data, so a rule leaves nothing out.
        if is_folder and self._root / name in self._excluded:
            return True
        if rule := find_rule(ignore, name, is_folder=is_folder):
            self._ignored.append(IgnoredName(name, is_folder, rule))
            return True
        if not entry.name.isascii() and not _is_utf8(entry.name):
            self._odd.append(name)
            return True
        plain = entry.name.isprintable()
        if not plain and any(ord(c) < 32 or ord(c) == 127 for c in entry.name):
            raise UsageError(
                f"{name!a} has a control character in its name",
                why="such a name can deceive a terminal, so labctl does not transfer it",
                hint=f"rename it, or add its directory to {IGNORE_FILES[1]}",
            )
        return False

    def _read_rules(self, prefix: str, entries: list[os.DirEntry[str]], ignore: Ignore) -> Ignore:
        rules, invalid = read_rules(self._root, prefix, (entry.name for entry in entries))
        self._bad_rules += invalid
        return (*ignore, (prefix, rules)) if rules else ignore

    def report_skipped(self, reporter: Reporter) -> None:
        """Emit a warning for each kind of files and rules that were left out."""
        for what, names in (
            ("skipped environments of packages", self._environments),
            ("skipped symbolic links", self._links),
            ("skipped files whose names are not UTF-8", self._odd),
            ("skipped invalid ignore rules", self._bad_rules),
        ):
            if names:
                shown = names_text([ascii(n)[1:-1] for n in sorted(names)], NAMED_AT_MOST)
                reporter.emit(Note(text=f"{what}: {shown}", level="warning"))


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
