"""The labctl agent, unpacked and compiled once for all servers that are directories here."""

from __future__ import annotations

import io
import subprocess
import tempfile
import threading
import zipfile
from contextlib import suppress
from pathlib import Path

from agent_forks import CALL, AgentForks

from labctl.servers.agent import build_program, program_name

# The directory of the agent, deleted when the tests end; empty until a server needs it.
_directories: list[tempfile.TemporaryDirectory[str]] = []
_forks: list[AgentForks] = []
_guard = threading.Lock()


def find_agent() -> str:
    """Return the directory of the unpacked agent. Servers of a class ask for it all at once."""
    with _guard:
        if not _directories:
            _directories.append(tempfile.TemporaryDirectory(prefix="labctl-agent-"))
            with zipfile.ZipFile(io.BytesIO(build_program())) as program:
                program.extractall(_directories[0].name)
    return _directories[0].name


def link_agent(home: Path) -> None:
    """Link the agent into a server's home, so that no server has to compile it again."""
    link = home / ".cache" / "labctl" / program_name()
    link.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        link.symlink_to(find_agent())


def run_line(
    line: str, stdin: bytes, environ: dict[str, str]
) -> subprocess.CompletedProcess[bytes]:
    """Run a line that a transport sends to the shell of a server in `environ`."""
    if call := CALL.match(line):
        agent = find_agent()
        with _guard:
            if not _forks:
                _forks.append(AgentForks(agent))
        return _forks[0].call(call, stdin, environ)
    return subprocess.run(
        ["sh", "-c", line], input=stdin, capture_output=True, env=environ, check=False
    )
