"""The ignore rules of a lab: .gitignore and .labignore, as git reads them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from labctl.lazy import lazy_imports

with lazy_imports(__name__):
    import pathspec

IGNORE_FILES = (".gitignore", ".labignore")
NEVER_ANYWHERE = frozenset({".git", ".venv", "__pycache__", ".ipynb_checkpoints"})
# A directory with one of these names in it is an environment of packages, whatever its own name is.
ENVIRONMENT_MARKS = frozenset({"pyvenv.cfg", "conda-meta"})
NEVER_AT_TOP = frozenset({".labctl", "runs", "server-edits", "server-home", "assignment.yaml"})


class IgnoreRule(NamedTuple):
    """One line of an ignore file. `file` is the ignore file's path relative to the lab."""

    excludes: bool
    regex: re.Pattern[str]
    line: str
    file: str


class IgnoredName(NamedTuple):
    """A file or directory that `rule` leaves out. The walk does not enter such a directory."""

    name: str
    is_folder: bool
    rule: IgnoreRule


# The rules of each directory from the root down, each with the directory's prefix.
Ignore = tuple[tuple[str, tuple[IgnoreRule, ...]], ...]


class DirectoryRules(NamedTuple):
    """The rules of one directory's ignore files in order, and the lines that are no rules."""

    rules: tuple[IgnoreRule, ...]
    invalid: tuple[str, ...]


def read_rules(root: Path, prefix: str, names: Iterable[str]) -> DirectoryRules:
    """Read the ignore files among `names`, which may be in the directory `prefix` below `root`."""
    present = set(names)
    rules: list[IgnoreRule] = []
    invalid: list[str] = []
    for name in IGNORE_FILES:
        path = root / (prefix + name)
        if name not in present or path.is_symlink() or not path.is_file():
            continue
        text = path.read_text("utf-8", errors="surrogateescape").removeprefix("\ufeff")
        parsed = parse_rules(text.replace("\r\n", "\n").split("\n"), prefix + name)
        rules += parsed.rules
        invalid += parsed.invalid
    return DirectoryRules(tuple(rules), tuple(invalid))


def parse_rules(lines: Iterable[str], file: str = IGNORE_FILES[0]) -> DirectoryRules:
    """Parse the lines of one ignore file."""
    rules: list[IgnoreRule] = []
    invalid: list[str] = []
    for line in lines:
        # In git, `a/**` is everything inside `a`, but not `a` itself, so that `!a/keep` can follow.
        read = re.sub(r"/\*\*(/?)\s*$", r"/**/*\1", line)
        try:
            parsed = pathspec.GitIgnoreSpec.from_lines([read]).patterns
        except ValueError:
            invalid.append(f"{file}: {line}")
            continue
        rules += [
            IgnoreRule(bool(p.include), p.regex, line.strip(), file)
            for p in parsed
            if p.include is not None and p.regex
        ]
    return DirectoryRules(tuple(rules), tuple(invalid))


def find_rule(ignore: Ignore, name: str, *, is_folder: bool) -> IgnoreRule | None:
    """Return the rule that excludes `name`: the last match counts, the nearest directory's first.

    The walk never enters an ignored directory, so a rule must match the name itself; pathspec's own
    matching would also apply rules that match a directory above.
    """
    for prefix, rules in reversed(ignore):
        relative = name[len(prefix) :] + ("/" if is_folder else "")
        for rule in reversed(rules):
            if rule.regex.pattern.startswith("^"):
                matches = rule.regex.fullmatch(relative) is not None
            else:  # `**` means everything, `**/` every directory
                matches = is_folder or not rule.regex.groups
            if matches:
                return rule if rule.excludes else None
    return None


def find_ignored_name(
    root: Path, name: str, read: Callable[[str], tuple[IgnoreRule, ...]] | None = None
) -> IgnoredName | None:
    """Return what leaves `name` out of a push: itself, or a directory above it.

    `name` is relative to the lab's directory `root`. None if no rule excludes it. `read` returns
    the rules of the directory with a prefix; it may keep them for many names.
    """
    read = read or (lambda prefix: read_rules(root, prefix, IGNORE_FILES).rules)
    ignore: Ignore = ()
    parts = PurePosixPath(name).parts
    for depth, part in enumerate(parts):
        prefix = "".join(f"{above}/" for above in parts[:depth])
        ignore = (*ignore, (prefix, read(prefix)))
        is_folder = depth < len(parts) - 1 or (root / name).is_dir()
        if rule := find_rule(ignore, prefix + part, is_folder=is_folder):
            return IgnoredName(prefix + part, is_folder, rule)
    return None


def create_ignored_directory(directory: Path) -> None:
    """Create a directory for downloads, with a .gitignore that hides it from `git status`.

    An existing directory stays as it is: it may be the user's own.
    """
    try:
        directory.mkdir(parents=True)
    except FileExistsError:
        return
    # Without this file, git lists the downloads, which is no reason to refuse them.
    with contextlib.suppress(OSError):
        (directory / IGNORE_FILES[0]).write_text("*\n")


def rule_text(rule: IgnoreRule) -> str:
    """Return the rule and its file, for example "*.bin in .gitignore"."""
    return f"{ascii(rule.line)[1:-1]} in {ascii(rule.file)[1:-1]}"


def inclusion_text(rule: IgnoreRule, path: str) -> str:
    """Return the line that sends `path` although `rule` excludes it, and its file.

    `path` ends with `/` for an excluded directory, and with `/**` for everything in a directory.
    The line goes beside the rule: the rules of deeper directories have precedence.
    """
    above = rule.file[: -len(rule.file.rpartition("/")[2])]
    line, file = f"!/{path.removeprefix(above)}", f"{above}{IGNORE_FILES[1]}"
    return f"{ascii(line)[1:-1]} to {ascii(file)[1:-1]}"
