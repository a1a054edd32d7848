"""A lab whose commands tell how long each part took, on servers of this machine or of a cloud."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lab_server import run_labctl
from benchmarks.measure import NotDoneError, environment

# The volumes of servers belong to a user name. This one shares none with the user's own labs.
OWNER = "labctl-bench"


@dataclass(frozen=True)
class TimedLab:
    home: Path
    root: Path
    command: tuple[str, ...]
    # more environment variables
    settings: dict[str, str] = field(default_factory=dict)

    def labctl(self, *words: str) -> str:
        """Run labctl in the lab; return its standard output."""
        env = {
            **environment(self.home),
            "LOGNAME": OWNER,
            "LABCTL_CACHE_POOL": OWNER,
            **self.settings,
        }
        return run_labctl(self.root, env, *words)

    def read_timings(self, *words: str, after: tuple[str, ...] = ()) -> dict[str, Any]:
        printed = self.labctl(*words, "--timings", "--json", *after)
        timings: dict[str, Any] = json.loads(printed)["timings"]
        return timings

    def run(self, run_id: str) -> dict[str, Any]:
        timings = self.read_timings("run", "--id", run_id, after=("--", *self.command))
        if "first line" not in {part["name"] for part in timings["parts"]}:
            raise NotDoneError("the run printed nothing")
        return timings

    def run_on_new_server(self, run_id: str) -> float:
        """Create a server, then return the seconds from `labctl run` to its first line."""
        self.labctl("up", "--yes")
        total_s: float = self.run(run_id)["total_s"]
        return total_s

    def end_server(self) -> None:
        self.labctl("down", "--yes", "--discard")


def make_small_lab(
    home: Path, name: str, mib: int = 64, provider: str = "local", **settings: str
) -> TimedLab:
    """Make a lab without a training; its image has so many MiB that no other lab has."""
    root = home / name
    root.mkdir(parents=True)
    base = "ARG BASE=debian:bookworm-slim\nFROM ${BASE}\n"
    (root / "Dockerfile").write_text(f"{base}RUN head -c {mib}M /dev/urandom >/data\n")
    (root / "lab.yaml").write_text(
        f"lab: {name}\nserver: {{provider: {provider}}}\nimage: {{build: .}}\nrun: echo begun\n"
    )
    return TimedLab(home, root, ("echo", "begun"), settings)
