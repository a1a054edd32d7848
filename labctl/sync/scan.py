"""What a lab consists of here: regular files, their hashes, and what is left out.

Links are never followed. Hashes are kept in `<lab>/.labctl/index.json` by size, times and inode,
so that a scan reads only what changed.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from labctl.errors import NotFoundError, UsageError
from labctl.events import Note, Progress, Reporter
from labctl.model import FileEntry

IGNORE_FILES = (".gitignore", ".labignore")
NEVER_ANYWHERE = frozenset({".git", ".venv", "__pycache__", ".ipynb_checkpoints"})
NEVER_AT_TOP = frozenset({".labctl", "runs", "server-edits", "assignment.yaml"})
# A file written this recently may be written again without its time changing: not cached.
RACY_S = 2.0
NAMED_AT_MOST = 5
SMALL_BYTES = 256 * 1024
# From here on a file that is to travel had better be hashed on its way.
LARGE_BYTES = 32 * 1024**2
MANY_FILES = 1000
# How often reading is told of.
TOLD_BYTES = 4 * 1024**2
Rules = tuple[tuple[bool, re.Pattern[str]], ...]
Ignore = tuple[tuple[str, Rules], ...]
Found = tuple[str, os.stat_result]
# Size, mtime_ns, inode, ctime_ns and the hash of the file that had them.
Entry = tuple[int, int, int, int, str]


class Index:
    """Hashes of files, kept between calls. A lost index costs time, nothing else."""

    def __init__(self, lab_root: Path, section: str) -> None:
        self._path = lab_root / ".labctl" / "index.json"
        self._section = section
        self._known = _read_index(self._path).get(section, {})
        self._fresh: dict[str, Entry] = {}
        # Names of what `hash` did not know.
        self.read: set[str] = set()

    def known(self, name: str, found: os.stat_result) -> str:
        """The hash of the file that stat describes, "" if it must be read."""
        entry = self._fresh.get(name) or self._known.get(name)
        if entry is None or entry[:4] != identity(found):
            return ""
        self._fresh[name] = entry
        return entry[4]

    def hash(self, name: str, path: Path) -> tuple[str, os.stat_result]:
        """The file's hash and the stat it belongs to; read only where it is not known."""
        found = path.stat(follow_symlinks=False)
        sha256 = self.known(name, found)
        if sha256:
            return sha256, found
        sha256 = hash_file(path)
        self.read.add(name)
        self.learn(name, found, sha256)
        return sha256, found

    def learn(self, name: str, found: os.stat_result, sha256: str) -> None:
        """`put`, for a file that was found here and may have been written just now."""
        if time.time() - found.st_mtime > RACY_S:
            self.put(name, found, sha256)

    def put(self, name: str, found: os.stat_result, sha256: str) -> None:
        self._fresh[name] = (*identity(found), sha256)

    def save(self, *, keep: bool = False) -> None:
        """Write what was asked for since; with `keep`, also what was known but not asked for."""
        entries = {**self._known, **self._fresh} if keep else self._fresh
        if entries == self._known:
            return
        self._known = dict(entries)
        self._path.parent.mkdir(exist_ok=True)
        whole = {**_read_index(self._path), self._section: entries}
        staging = self._path.with_name(f".index.{secrets.token_hex(4)}")
        staging.write_bytes(msgspec.json.encode(whole))
        staging.replace(self._path)


def _read_index(path: Path) -> dict[str, dict[str, Entry]]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, Entry]])
    except (OSError, msgspec.DecodeError):
        return {}


def identity(found: os.stat_result) -> tuple[int, int, int, int]:
    """What changes whenever a file's contents do."""
    return found.st_size, found.st_mtime_ns, found.st_ino, found.st_ctime_ns


def hash_file(path: Path, length: int | None = None) -> str:
    """sha256 of a file in hex, or of its first `length` bytes."""
    with path.open("rb", buffering=0) as file:
        if length is None:
            size = os.fstat(file.fileno()).st_size
            if size < SMALL_BYTES:
                whole = file.read(size + 1)
                if len(whole) == size:
                    return hashlib.sha256(whole).hexdigest()
                file.seek(0)
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256()
        while length > 0 and (block := file.read(min(1 << 20, length))):
            digest.update(block)
            length -= len(block)
        return digest.hexdigest()


def scan_code(
    lab_root: Path,
    reporter: Reporter,
    *,
    data: Iterable[Path] = (),
    later: Index | None = None,
) -> tuple[FileEntry, ...]:
    """The lab's code, in order of name: what its ignore files and `data` (directories) leave.

    With `later`, the index to use, large files that it does not know have no `sha256`, and nothing
    has one where much is scanned for the first time: `push` takes it on the way.

    UsageError for names with control characters; links and names that are not UTF-8 are told.
    """
    root = lab_root.resolve()
    excluded = frozenset(path.resolve() for path in data)
    index = later or Index(root, "code")
    walk = _Walk(root, excluded, code=True)
    return _scan(root, index, reporter, walk, later=later is not None)


def scan_data(
    lab_root: Path, name: str, directory: Path, reporter: Reporter, *, later: Index | None = None
) -> tuple[FileEntry, ...]:
    """The files of a data set, in order of name. Nothing is ignored, only links are left out.

    `later` as for `scan_code`.
    """
    if not directory.is_dir():
        raise NotFoundError(
            f"the data set {name} is not there: {directory} is no directory",
            hint=f"mend data.{name} in lab.yaml",
        )
    index = later or Index(lab_root.resolve(), f"data/{name}")
    root = directory.resolve()
    walk = _Walk(root, frozenset(), code=False)
    return _scan(root, index, reporter, walk, later=later is not None)


def refresh(
    root: Path,
    files: Sequence[FileEntry],
    changed: set[str],
    reporter: Reporter,
    index: Index | None,
) -> tuple[FileEntry, ...]:
    """`files` with the `changed` ones read anew; those that are gone are left out."""
    kept = []
    done, total = 0, sum(entry.size for entry in files if entry.path in changed)
    for entry in files:
        if entry.path in changed:
            path = root / entry.path
            try:
                found = path.stat(follow_symlinks=False)
                if not stat.S_ISREG(found.st_mode):
                    continue
                sha256 = hash_file(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            if index:
                index.learn(entry.path, found, sha256)
            done += entry.size
            reporter.emit(Progress(name="hash", done=done, total=total, unit="bytes"))
            entry = _entry(entry.path, found, sha256)
        kept.append(entry)
    return tuple(kept)


def _scan(
    root: Path, index: Index, reporter: Reporter, walk: _Walk, *, later: bool
) -> tuple[FileEntry, ...]:
    found = sorted(walk.files())
    walk.tell(reporter)
    known = [index.known(name, before) for name, before in found]
    most = _most_read(found, known) if later else sys.maxsize
    pairs = zip(found, known, strict=True)
    unread = sum(s.st_size for (_, s), sha256 in pairs if not sha256 and s.st_size < most)
    files: list[FileEntry] = []
    done = told = 0
    for (name, before), sha256 in zip(found, known, strict=True):
        if not sha256 and before.st_size < most:
            try:
                sha256, before = index.hash(name, root / name)
            except FileNotFoundError:
                continue
            done += before.st_size
            if done - told >= TOLD_BYTES or done >= unread:
                told = done
                reporter.emit(Progress(name="hash", done=done, total=unread, unit="bytes"))
        files.append(_entry(name, before, sha256))
    index.save()
    return tuple(files)


def _most_read(found: list[Found], known: list[str]) -> int:
    """The size from which on files that are not known are left to be hashed on their way.

    A first push of much hashes all of it so. A later one had better know the hashes of what has
    changed: the server has files of these names, and would have to ask.
    """
    much = len(found) >= MANY_FILES or sum(one.st_size for _, one in found) >= LARGE_BYTES
    return 0 if much and not any(known) else LARGE_BYTES


def _entry(name: str, found: os.stat_result, sha256: str) -> FileEntry:
    mode = 0o755 if found.st_mode & 0o100 else 0o644
    return FileEntry(
        path=name, size=found.st_size, sha256=sha256, mode=mode, mtime_ns=found.st_mtime_ns
    )


class _Walk:
    """One look through a tree: which files count, and what was left out and why."""

    def __init__(self, root: Path, excluded: frozenset[Path], *, code: bool) -> None:
        self._root = root
        self._excluded = excluded
        self._code = code
        self._links: list[str] = []
        self._odd: list[str] = []
        self._bad_rules: list[str] = []

    def files(self) -> Iterator[Found]:
        """(path relative to the root, stat) of each regular file that counts."""
        return self._below("", ())

    def _below(self, prefix: str, ignore: Ignore) -> Iterator[Found]:
        with os.scandir(self._root / prefix) as listing:
            entries = list(listing)
        if self._code:
            ignore = self._rules(prefix, entries, ignore)
        for entry in entries:
            name = prefix + entry.name
            if self._left_out(name, entry, ignore):
                continue
            if entry.is_symlink():
                self._links.append(name)
            elif entry.is_dir():
                yield from self._below(name + "/", ignore)
            elif entry.is_file():
                yield name, entry.stat(follow_symlinks=False)

    def _left_out(self, name: str, entry: os.DirEntry[str], ignore: Ignore) -> bool:
        if self._code and (entry.name in NEVER_ANYWHERE or name in NEVER_AT_TOP):
            return True
        is_folder = entry.is_dir(follow_symlinks=False)
        if ignored(ignore, name, is_folder=is_folder):
            return True
        if is_folder and self._root / name in self._excluded:
            return True
        if not entry.name.isascii() and not _is_utf8(entry.name):
            self._odd.append(name)
            return True
        plain = entry.name.isprintable()
        if not plain and any(ord(c) < 32 or ord(c) == 127 for c in entry.name):
            raise UsageError(
                f"{name!a} has a control character in its name",
                why="a terminal could be deceived by it; labctl carries no such names",
                hint=f"rename it, or name its directory in {IGNORE_FILES[1]}",
            )
        return False

    def _rules(self, prefix: str, entries: list[os.DirEntry[str]], ignore: Ignore) -> Ignore:
        lines: list[str] = []
        for wanted in IGNORE_FILES:
            for entry in entries:
                if entry.name == wanted and entry.is_file(follow_symlinks=False):
                    text = Path(entry.path).read_text("utf-8", errors="surrogateescape")
                    lines += text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
        if not any(lines):
            return ignore
        spec, bad = parse_rules(lines)
        self._bad_rules += [f"{prefix}{IGNORE_FILES[0]}: {line}" for line in bad]
        return (*ignore, (prefix, spec))

    def tell(self, reporter: Reporter) -> None:
        for what, names in (
            ("links are not carried", self._links),
            ("names that are not UTF-8 are not carried", self._odd),
            ("ignore rules that cannot be read are skipped", self._bad_rules),
        ):
            if names:
                shown = ", ".join(ascii(n)[1:-1] for n in sorted(names)[:NAMED_AT_MOST])
                more = f" and {len(names) - NAMED_AT_MOST} more" * (len(names) > NAMED_AT_MOST)
                reporter.emit(Note(text=f"{what}: {shown}{more}", level="warning"))


def parse_rules(lines: list[str]) -> tuple[Rules, list[str]]:
    """The rules of one directory's ignore files, in order, and the lines that are no rules."""
    from pathspec import GitIgnoreSpec

    rules: list[tuple[bool, re.Pattern[str]]] = []
    bad = []
    for line in lines:
        # With git, `a/**` is all that lies in `a`, not `a` itself, so that `!a/keep` can follow.
        read = re.sub(r"/\*\*(/?)\s*$", r"/**/*\1", line)
        try:
            parsed = GitIgnoreSpec.from_lines([read]).patterns
        except ValueError:
            bad.append(line)
            continue
        rules += [(bool(p.include), p.regex) for p in parsed if p.include is not None and p.regex]
    return tuple(rules), bad


def ignored(ignore: Ignore, name: str, *, is_folder: bool) -> bool:
    """Whether the rules leave `name` out: the last one counts, the nearest directory's first.

    `ignore` holds (the directory's prefix, its rules) from the root down to `name`'s directory.
    What lies in an ignored directory is not asked about, so a rule counts only where it means
    the very name; pathspec's own look would count what it says of the directories above too.
    """
    for prefix, rules in reversed(ignore):
        asked = name[len(prefix) :] + ("/" if is_folder else "")
        for include, regex in reversed(rules):
            if regex.pattern.startswith("^"):
                meant = regex.fullmatch(asked) is not None
            else:  # `**` means everything, `**/` every directory
                meant = is_folder or not regex.groups
            if meant:
                return include
    return False


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
