"""The labctl agent, unpacked and compiled once for all servers that are directories here."""

from __future__ import annotations

import functools
import io
import tempfile
import zipfile
from pathlib import Path

from labctl.servers.agent import build_program, program_name


@functools.cache
def unpack_agent() -> tempfile.TemporaryDirectory[str]:
    """Unpack the agent to a directory that is deleted when the tests end."""
    directory = tempfile.TemporaryDirectory(prefix="labctl-agent-")
    with zipfile.ZipFile(io.BytesIO(build_program())) as program:
        program.extractall(directory.name)
    return directory


def link_agent(home: Path) -> None:
    """Link the agent into a server's home, so that no server has to compile it again."""
    link = home / ".cache" / "labctl" / program_name()
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(unpack_agent().name)
