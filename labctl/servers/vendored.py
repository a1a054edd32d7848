"""Packages by others that the agent takes along to a server, byte for byte as they were released.

They are dependencies of labctl like any other, and are read where they are installed. The hashes of
each version that may go to a server are in vendored.json: root runs these files there.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from labctl.errors import LabError

HASHES = Path(__file__).with_name("vendored.json")
# Version -> file, as seen from the directory of installed packages -> SHA-256.
Hashes = Mapping[str, Mapping[str, str]]


def read_vendored_files(hashes: Path = HASHES) -> Iterator[tuple[str, bytes]]:
    """Yield (path, content) of every vendored file; LabError where one is not as released."""
    for package, versions in json.loads(hashes.read_text(encoding="utf-8")).items():
        yield from _read_released(package, versions).items()


def _read_released(package: str, versions: Hashes) -> dict[str, bytes]:
    """The files of the first version that all hashes agree with."""
    differences = []
    for version, files in versions.items():
        folder = _find_folder(next(iter(files)))
        if folder is None:
            raise _describe_problem(package, versions, "it is not installed")
        found = {name: _read_file(folder / name) for name in files}
        wrong = [name for name, text in found.items() if _hash_text(text) != files[name]]
        if not wrong:
            return found
        differences.append(f"{folder / wrong[0]} is not the file of {package} {version}")
    raise _describe_problem(package, versions, "; ".join(differences))


def _find_folder(file: str) -> Path | None:
    """The directory of installed packages that `file`, of a package or a module, is in."""
    top, _, below = file.partition("/")
    spec = find_spec(top if below else top.removesuffix(".py"))
    if spec is None or not spec.origin:
        return None
    return Path(spec.origin).parents[1 if below else 0]


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _hash_text(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def _describe_problem(package: str, versions: Hashes, why: str) -> LabError:
    newest = list(versions)[-1]
    return LabError(
        f"labctl cannot send its agent to a server: {package} is not as it was released",
        why=why,
        hint=f"{sys.executable} -m pip install --force-reinstall --no-deps {package}=={newest}",
    )
