"""How this labctl was installed: its commit, and the command that adds one of its extras."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

from labctl.lazy import lazy_imports

with lazy_imports(__name__):
    import json
    from importlib import metadata
    from urllib import parse

# as long as the commits that GitHub shows
COMMIT_DIGITS = 7
# in a wheel that was built in a clone; hatch_build.py writes it
BUILT_COMMIT = "commit.txt"


def find_commit(clone: Path | None = None) -> str:
    """Return the short commit of the clone that labctl runs from, or that it was built from.

    "" for a package that was not built in a clone. git's files are read without git, which may be
    absent and takes longer than `--version`.
    """
    clone = clone or Path(__file__).parents[2]
    if not (clone / "pyproject.toml").is_file():
        return _read_built_commit(clone / "labctl" / BUILT_COMMIT)
    try:
        commit = _read_commit(_find_git_dir(clone))
    except (OSError, UnicodeDecodeError):
        return ""
    return commit[:COMMIT_DIGITS] if re.fullmatch("[0-9a-f]{40,64}", commit) else ""


def _read_built_commit(record: Path) -> str:
    try:
        return record.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _find_git_dir(clone: Path) -> Path:
    """Return the directory with HEAD; in a worktree, .git is a file that names it."""
    path = clone / ".git"
    if path.is_dir():
        return path
    return clone / path.read_text().strip().removeprefix("gitdir: ")


def _read_commit(git_dir: Path) -> str:
    """Return the commit of HEAD; "" for a branch without a commit."""
    head = (git_dir / "HEAD").read_text().strip()
    reference = head.removeprefix("ref: ")
    if reference == head:
        return head
    shared = git_dir / "commondir"  # a worktree's branches are in the clone that it belongs to
    common_dir = git_dir / shared.read_text().strip() if shared.exists() else git_dir
    if (common_dir / reference).is_file():
        return (common_dir / reference).read_text().strip()
    packed = (common_dir / "packed-refs").read_text().splitlines()
    lines = (line.partition(" ") for line in packed)
    return next((commit for commit, _, name in lines if name == reference), "")


def install_command(extra: str) -> str:
    """Return the command that installs labctl again with `extra`, from the clone it came from.

    The extra `train` comes along, as in the README: an installation would lose it otherwise.
    """
    extras = ",".join(dict.fromkeys(["train", extra]))
    wanted = shlex.quote(f"{_find_source()}[{extras}]")
    if Path(sys.prefix, "uv-receipt.toml").exists():
        return f"uv tool install --force {wanted}"
    if Path(sys.prefix, "pipx_metadata.json").exists():
        return f"pipx install --force {wanted}"
    return f"{shlex.quote(sys.executable)} -m pip install {wanted}"


def _find_source() -> str:
    """Return the directory that labctl was installed from; its name if it came from an index."""
    clone = Path(__file__).parents[2]
    if (clone / "pyproject.toml").exists():
        return str(clone)
    try:
        origin = json.loads(metadata.distribution("labctl").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        return "labctl"
    address = parse.urlsplit(str(origin.get("url", "")))
    return parse.unquote(address.path) if address.scheme == "file" else "labctl"
