"""Third-party packages that are installed with the agent, byte for byte as they were released.

They are normal dependencies of labctl, and are read from where they are installed. vendored.json
has the hashes of each version that may be sent to a server: root runs these files there.
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
    """Yield (path, content) of every vendored file; LabError if one differs from its release."""
    for package, versions in json.loads(hashes.read_text(encoding="utf-8")).items():
        yield from _read_released(package, versions).items()


def _read_released(package: str, versions: Hashes) -> dict[str, bytes]:
    """Read the files of the first version whose hashes all match."""
    differences = []
    for version, files in versions.items():
        folder = _find_folder(next(iter(files)))
        if folder is None:
            raise _make_package_error(package, versions, "it is not installed")
        contents = {name: _read_file(folder / name) for name in files}
        wrong = [name for name, text in contents.items() if _hash_text(text) != files[name]]
        if not wrong:
            return contents
        differences.append(f"{folder / wrong[0]} is not the file of {package} {version}")
    raise _make_package_error(package, versions, "; ".join(differences))


def _find_folder(file: str) -> Path | None:
    """Find the directory of installed packages that holds `file` of a package or module."""
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


def _make_package_error(package: str, versions: Hashes, why: str) -> LabError:
    newest = list(versions)[-1]
    return LabError(
        f"labctl cannot install its agent on a server: {package} differs from its release",
        why=why,
        hint=f"{sys.executable} -m pip install --force-reinstall --no-deps {package}=={newest}",
    )
