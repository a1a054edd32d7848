"""Check a file of packages that an image is built from: requirements.txt, pyproject.toml, conda's.

Only this one file goes into the build, so it must not refer to others.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from labctl.config.document import quote

MAX_PACKAGES_FILE_BYTES = 1024 * 1024

_OTHER_FILE = re.compile(r"(?:-r|-c|--requirement|--constraint)[ =]?\S")
_LOCAL_CODE = re.compile(r"(?:-e|--editable)[ =]?\S|\.{0,2}/|\.$|\.\[|file:|\S+ @ file:")


def find_problem(file: Path) -> str:
    """Return why the image cannot be built from this file; "" if nothing speaks against it."""
    try:
        data = file.read_bytes()
        if len(data) > MAX_PACKAGES_FILE_BYTES:
            return f"{quote(file.name)} is too large: at most 1 MiB"
        text = data.decode()
    except OSError as error:
        return f"{quote(file.name)} cannot be read: {error.strerror}"
    except UnicodeDecodeError:
        return f"{quote(file.name)} is not a text in UTF-8"
    if file.suffix == ".toml":
        return _find_problem_in_project(file.name, text)
    return _find_problem_in_lines(file.name, text)


def _find_problem_in_project(name: str, text: str) -> str:
    try:
        project = tomllib.loads(text).get("project")
    except tomllib.TOMLDecodeError as error:
        return f"{quote(name)} is not valid TOML: {error}"
    if not isinstance(project, dict):
        return f"{quote(name)} has no [project] table, which lists dependencies"
    if "dependencies" in project.get("dynamic", ()):
        return f"{quote(name)} has dynamic dependencies; list them, or use a requirements.txt"
    return ""


def _find_problem_in_lines(name: str, text: str) -> str:
    """Find a line that refers to another file, in requirements.txt or environment.yml."""
    for number, line in enumerate(text.splitlines(), 1):
        words = re.sub(r"^\s*-\s+|(?:^|\s)#.*", "", line).strip().strip("'\"")
        if _OTHER_FILE.match(words):
            return (
                f"line {number} of {quote(name)} reads another file ({quote(words)}); list all "
                "packages in one file, or write a Dockerfile"
            )
        if _LOCAL_CODE.match(words):
            return (
                f"line {number} of {quote(name)} installs a directory ({quote(words)}); the image "
                "has only packages, and a run has your code at /lab/code: remove the line, or "
                "write a Dockerfile"
            )
    return ""
