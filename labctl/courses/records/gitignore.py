"""Keep a course's private files out of git."""

from __future__ import annotations

from pathlib import Path

from labctl.errors import LabError

FILE = ".gitignore"
# The pattern with a leading dot matches the draft of such a file, which a kill may leave.
JOIN_FILES = ("*.join", ".*.join.*", "invitations.csv", ".invitations.csv.*")
PRIVATE_FILES = (".course/", "roster.csv", ".roster.csv.*", "imported/", *JOIN_FILES)


def ignore_in_git(directory: Path, patterns: tuple[str, ...] = PRIVATE_FILES) -> None:
    """Add the patterns that the directory's .gitignore lacks; its other lines stay as they are."""
    file = directory / FILE
    try:
        text = file.read_text() if file.exists() else ""
        missing = [pattern for pattern in patterns if pattern not in text.splitlines()]
        if not missing:
            return
        begin = "\n" if text and not text.endswith("\n") else ""
        with file.open("a") as ignored:
            ignored.write(begin + "".join(f"{pattern}\n" for pattern in missing))
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(
            f"cannot write {file}",
            why=f"git must not track {', '.join(patterns)}: {error}",
            hint=f"ls -l {file}",
        ) from error
