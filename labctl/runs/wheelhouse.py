"""This machine's wheelhouse on the server, and the command that adds what a build did not find."""

from __future__ import annotations

import platform
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from labctl.lazy import lazy_imports
from labctl.model import Server
from labctl.servers.agent import AgentClient
from labctl.servers.context import LabContext

with lazy_imports(__name__):
    from labctl.runs import build_output
    from labctl.sync import push, scan, transfer_lock

# What pip and uv print in a build without an index. A build has no field for the reason, and one
# exit code for all failures; the hint is only shown beside the output.
_PIP = re.compile(r"ERROR: No matching distribution found for (.+)")
_UV = re.compile(r"No solution found when resolving dependencies")
_UV_NAME = re.compile(r"Because (\S+) was not found in the provided package locations")
_UV_PYTHON = re.compile(r"Using Python (\d+\.\d+)\.\d+ ")
# tags of wheels for Linux, for pip on another system
_TAGS = ("manylinux_2_28", "manylinux_2_17", "manylinux2014")


def push_wheelhouse(context: LabContext, server: Server, remote: AgentClient) -> None:
    """Push this machine's wheelhouse, for pip in a build; do nothing if none is configured."""
    if not context.config.wheelhouse:
        return
    root, wheels = context.config.root, Path(context.config.wheelhouse)
    index = scan.HashIndex(root, "data/wheelhouse")
    files = scan.scan_data(root, "wheelhouse", wheels, context.reporter, later=index)
    target = (remote, context.config.name, context.lab_id, "wheelhouse")
    with transfer_lock.hold_transfers(context.config.root, "push", context.reporter):
        push.push_tree(*target, wheels, files, context.reporter, index=index)


def suggest_download(
    wheelhouse: str, output: Sequence[str], arch: str, package_file: str = ""
) -> str:
    """Return what to type if a build missed a wheel; "" after other errors.

    `arch` is the server's, as `uname -m` prints it, or "". `package_file` is the lab's
    requirements.txt, if the build installs one.
    """
    text = "\n".join(output)
    missing = _PIP.search(text)
    names = [missing[1].strip()] if missing else [match[1] for match in _UV_NAME.finditer(text)]
    if not wheelhouse or not (missing or _UV.search(text)):
        return ""
    python = match[1] if (match := _UV_PYTHON.search(text)) else ""
    wanted = ["-r", package_file] if package_file.endswith(".txt") else names
    if not wanted:
        return ""
    words = ["pip", "download", "-d", wheelhouse, *_list_tags(python, arch), *wanted]
    version = f"Python {python}" if python else "the image's version of Python"
    return (
        f"your wheelhouse lacks a package. Download it for {version}, then try again:\n"
        f"{shlex.join(words)}"
    )


def suggest_cached_wheels(cache_dir: Path, output: Sequence[str]) -> str:
    """Return how to use the wheels that scripts/setup downloaded, if a build had no index."""
    wheels = cache_dir / "wheelhouse"
    if not wheels.is_dir() or not build_output.is_index_unreachable(output):
        return ""
    setting = f"export LABCTL_WHEELHOUSE={shlex.quote(str(wheels))}"
    return f"{setting}   # the packages that scripts/setup downloaded; then try again"


def _list_tags(python: str, arch: str) -> list[str]:
    """Return the options of pip that choose wheels for another Python and another machine."""
    options = ["--python-version", python] if python else []
    if arch and (platform.system(), platform.machine()) != ("Linux", arch):
        options += [word for tag in _TAGS for word in ("--platform", f"{tag}_{arch}")]
    # pip refuses these options where it might have to build a wheel
    return [*options, "--only-binary=:all:"] if options else []
