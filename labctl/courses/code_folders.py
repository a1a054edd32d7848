"""The code of submissions as directories to read, each with a diff against the starter."""

from __future__ import annotations

import difflib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from labctl.config.reader import LAB_FILE
from labctl.courses.collect import Collection, SeatSubmission
from labctl.courses.records.folder import CourseFolder
from labctl.courses.starter_delivery import strip_generated_lines
from labctl.courses.starters import find_published
from labctl.model import Value
from labctl.submissions import bundle

CODE = "code/"
# A larger file is data: a diff of it helps nobody.
MOST_DIFF_BYTES = 1024 * 1024


class CodeFolder(Value, frozen=True):
    """The code of a seat's submission in `directory`. `diff` is "" if there is no starter.

    `is_new` is False if an earlier collection wrote this submission: it stays as it is.
    """

    seat: str
    directory: Path
    diff: str
    is_new: bool


def write_code_folders(
    folder: CourseFolder, collection: Collection, into: Path
) -> tuple[CodeFolder, ...]:
    """Write each submission's code to `into`/SEAT-NUMBER, and its diff beside it.

    A directory that exists is left alone, with the notes that staff may have made in it.
    """
    into.mkdir(parents=True, exist_ok=True)
    starter = find_published(folder, collection.assignment)
    handed_out = {path: file.content for path, file in starter.by_path().items()} if starter else {}
    return tuple(_write_code(submission, into, handed_out) for submission in collection.accepted)


def _write_code(
    submission: SeatSubmission, into: Path, handed_out: Mapping[str, bytes]
) -> CodeFolder:
    name = f"{submission.seat}-{submission.number}"
    directory = into / name
    diff = into / f"{name}.diff"
    is_new = not directory.exists()
    if is_new:
        with tempfile.TemporaryDirectory(dir=into, prefix=f".{name}-") as draft:
            _unpack(Path(submission.bundle), Path(draft) / name, (CODE,), CODE)
            if handed_out:
                text = "".join(_list_differences(Path(draft) / name, handed_out))
                diff.write_text(text, encoding="utf-8", errors="replace")
            (Path(draft) / name).replace(directory)
    return CodeFolder(
        seat=submission.seat,
        directory=directory,
        diff=str(diff) if diff.exists() else "",
        is_new=is_new,
    )


def unpack_parts(file: Path, into: Path, name: str, prefixes: tuple[str, ...]) -> Path:
    """Write the members of a bundle with these prefixes to `into`/`name`, unless it exists."""
    directory = into / name
    if not directory.exists():
        with tempfile.TemporaryDirectory(dir=into, prefix=f".{name}-") as draft:
            _unpack(file, Path(draft) / name, prefixes)
            try:
                (Path(draft) / name).rename(directory)
            except OSError:
                if not directory.is_dir():  # not another grader's copy of the same submission
                    raise
    return directory


def _unpack(file: Path, directory: Path, prefixes: tuple[str, ...], cut: str = "") -> None:
    """Write members of a bundle, without the prefix `cut`; none is executable, none is a link."""
    directory.mkdir()
    with file.open("rb") as stream:
        _, members = bundle.inspect(stream)
        for member in members:
            if not member.path.startswith(prefixes):
                continue
            target = directory / member.path.removeprefix(cut)
            target.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with os.fdopen(os.open(target, flags, 0o644), "wb") as out:
                shutil.copyfileobj(bundle.open_member(stream, member), out)


def _list_differences(directory: Path, handed_out: Mapping[str, bytes]) -> Iterator[str]:
    """Yield the lines of a unified diff from the starter's files to the student's."""
    own = {
        path.relative_to(directory).as_posix(): path
        for path in directory.rglob("*")
        if path.is_file()
    }
    for name in sorted(handed_out.keys() | own.keys()):
        before = handed_out.get(name)
        after = _read_own_file(name, own[name]) if name in own else None
        if before != after:
            yield from _diff_file(name, before, after)


def _read_own_file(name: str, path: Path) -> bytes | None:
    """Return what a student's file has beside what labctl wrote; None if that is nothing."""
    content = path.read_bytes()
    return content if name != LAB_FILE else strip_generated_lines(content) or None


def _diff_file(name: str, before: bytes | None, after: bytes | None) -> Iterator[str]:
    old, new = (f"{side}/{name}" for side in ("starter", "submission"))
    texts = [_decode(before), _decode(after)]
    if None in texts:
        yield f"Binary or large files {old} and {new} differ\n"
        return
    lines = difflib.unified_diff(
        (texts[0] or "").splitlines(),
        (texts[1] or "").splitlines(),
        old if before is not None else "/dev/null",
        new if after is not None else "/dev/null",
        lineterm="",
    )
    yield from (f"{line}\n" for line in lines)


def _decode(content: bytes | None) -> str | None:
    """Return the text of a file, "" if it is missing; None if it is no text, or too large."""
    if content is None:
        return ""
    if len(content) > MOST_DIFF_BYTES or b"\0" in content:
        return None
    try:
        return content.decode()
    except UnicodeDecodeError:
        return None
