"""The machine and the programs of a run, which explain its figures later."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from benchmarks.measure import environment
from benchmarks.peers import Peer


@dataclass(frozen=True)
class Circumstances:
    cpus: int | None
    cpu: str
    memory_gib: float
    load: list[float]
    system: str
    python: str
    labctl: str
    # whether the measured programs are those of this source tree
    is_this_tree: bool
    click: str
    ssh: str
    rsync: str
    docker: str
    peers: dict[str, str]


def read_circumstances(peers: dict[str, Peer]) -> Circumstances:
    """Return what this machine is, and which versions it has."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Circumstances(
        cpus=os.cpu_count(),
        cpu=_read_cpu(),
        memory_gib=round(memory_bytes / 2**30, 1),
        load=read_load(),
        system=platform.platform(),
        python=platform.python_version(),
        labctl=version("labctl"),
        is_this_tree=_is_this_tree(),
        click=version("click"),
        ssh=_print_version("ssh", "-V"),
        rsync=_print_version("rsync", "--version"),
        docker=_print_version("docker", "version", "--format", "{{.Server.Version}}"),
        peers={package: peer.version for package, peer in peers.items()},
    )


def _is_this_tree() -> bool:
    """Return whether the installed labctl, as a user starts it, is the one beside this folder."""
    words = (sys.executable, "-c", "import labctl; print(labctl.__file__)")
    home = Path.home()
    done = subprocess.run(words, cwd=home, env=environment(home), capture_output=True, text=True)
    return Path(done.stdout.strip()).parent.parent == Path(__file__).resolve().parent.parent


def read_load() -> list[float]:
    return [round(average, 1) for average in os.getloadavg()]


def _print_version(*words: str) -> str:
    """Return the first line; "" if the program is missing."""
    try:
        done = subprocess.run(words, capture_output=True, text=True)
    except OSError:
        return ""
    return (done.stdout or done.stderr).strip().partition("\n")[0]


def _read_cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
