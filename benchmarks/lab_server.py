"""A lab with a ready server on this machine, as a student has it after `labctl up`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import NotDoneError, environment
from benchmarks.startup import LABCTL


@dataclass(frozen=True)
class ReadyLab:
    """A lab with a server that has the image. `ssh` is the argv up to the remote command."""

    home: Path
    root: Path
    image: str
    ssh: tuple[str, ...] = ()
    user: str = ""
    host: str = ""

    def labctl(self, *words: str) -> str:
        return run_labctl(self.root, environment(self.home), *words)


def run_labctl(root: Path, env: dict[str, str], *words: str) -> str:
    """Run labctl in `root`; return its standard output. NotDoneError if it fails."""
    done = subprocess.run(
        [LABCTL, *words],
        cwd=root,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        message = done.stderr.strip()[-600:]
        raise NotDoneError(f"labctl {' '.join(words)} exited with {done.returncode}: {message}")
    return done.stdout


@contextmanager
def start_lab(home: Path, image: str) -> Iterator[ReadyLab]:
    """Run a lab and its server, and remove both at the end."""
    root = home / "bench"
    root.mkdir(parents=True)
    (root / "lab.yaml").write_text(f"lab: bench\nimage: {image}\nrun: echo done\n")
    lab = ReadyLab(home, root, image)
    try:
        print("starting a lab server", file=sys.stderr)
        server = json.loads(lab.labctl("up", "--yes", "--json"))["server"]
        lab.labctl("run", "--id", "warm", "--json")
        place = server["endpoint"]
        yield ReadyLab(home, root, image, _ssh(home, server), place["user"], place["host"])
    finally:
        lab.labctl("down", "--yes", "--discard")


def _ssh(home: Path, server: dict[str, dict[str, str]]) -> tuple[str, ...]:
    """Return ssh as a person uses it: defaults, a known host, no shared connection."""
    endpoint = server["endpoint"]
    known = home / "known_hosts"
    place = f"[{endpoint['host']}]:{endpoint['port']}"
    known.write_text(f"{place} {endpoint['host_key']}\n")
    return (
        *("ssh", "-F", "none", "-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes"),
        *("-o", f"UserKnownHostsFile={known}", "-i", endpoint["identity"]),
        *("-p", str(endpoint["port"]), f"{endpoint['user']}@{endpoint['host']}"),
    )
