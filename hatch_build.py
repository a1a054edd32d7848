"""Records in a wheel the commit that it was built from, for `labctl --version`."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# what a wheel is made of, and this file
SOURCES = (
    *("labctl", "docs", "images", "playbooks", "templates"),
    *("pyproject.toml", "hatch_build.py"),
)


def describe_commit(root: Path) -> str:
    """Return the commit of the clone at `root`, and whether files differ from it; "" without one.

    A directory inside another repository is not a clone, and its commit would be a wrong one.
    """
    try:
        top = _run_git(root, "rev-parse", "--show-toplevel")
        if Path(top).resolve() != root.resolve():
            return ""
        commit = _run_git(root, "rev-parse", "HEAD")
        changes = _run_git(root, "status", "--porcelain", "--", *SOURCES)
    except (OSError, subprocess.CalledProcessError):
        return ""
    if not re.fullmatch("[0-9a-f]{40,64}", commit):
        return ""
    return f"{commit[:7]} with changes" if changes else commit[:7]


def _run_git(root: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *words], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


class CommitHook(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        # An editable installation runs from the clone, whose commit changes.
        commit = "" if version == "editable" else describe_commit(Path(self.root))
        if commit:
            self.directory_of_record = tempfile.TemporaryDirectory()
            record = Path(self.directory_of_record.name, "commit.txt")
            record.write_text(f"{commit}\n")
            build_data["force_include"][str(record)] = "labctl/commit.txt"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "directory_of_record"):
            self.directory_of_record.cleanup()
