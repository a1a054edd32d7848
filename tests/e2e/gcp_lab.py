"""A rehearsed Google Cloud with machines that boot, and a person with a lab there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab_servers import wait_for

from labctl.rehearsal.core.scenario import Loss
from labctl.rehearsal.gcp import GcpRehearsal

LAB_YAML = """\
lab: digits
run: [python3, train.py]
server:
  provider: gcp
  gpu: auto
  executor: process
  ttl: 2h
"""
TRAIN = """\
import json, os, pathlib, signal, sys, time
logs = pathlib.Path(os.environ["LABCTL_LOG_DIR"])
checkpoints = pathlib.Path(os.environ["LABCTL_CHECKPOINT_DIR"])
saved = sorted(checkpoints.glob("*.txt"))
step = int(saved[-1].stem) if saved else 0
def save(*_):
    (checkpoints / f"{step:08}.txt").write_text("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
while step < 1_000_000:
    step += 1
    (logs / "progress.json").write_text(json.dumps({"step": step}))
    time.sleep(0.1)
"""
COMMAND_S = 400.0
HOLD_S = 120.0
ALIVE = ("pending", "running", "stopping", "stopped", "ending")


@dataclass
class GcpLab:
    """One person's lab: a directory and a home, and `labctl` in it."""

    cloud: GcpRehearsal
    root: Path
    environ: dict[str, str]

    @classmethod
    def create(cls, cloud: GcpRehearsal, directory: Path) -> GcpLab:
        (directory / "home").mkdir(parents=True)
        root = directory / "lab"
        root.mkdir()
        (root / "lab.yaml").write_text(LAB_YAML)
        (root / "train.py").write_text(TRAIN)
        plain = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("GOOGLE_", "CLOUDSDK_", "AWS_", "XDG_"))
        }
        environ = {**plain, **cloud.environment, "HOME": str(directory / "home")}
        return cls(cloud, root, environ)

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "labctl", *words],
            cwd=self.root,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def labctl(self, *words: str, code: int | None = 0) -> str:
        """What it printed, once it has ended with `code` (None: any)."""
        process = self.start(*words)
        output, _ = process.communicate(timeout=COMMAND_S)
        assert code in (None, process.returncode), output
        return output

    def json(self, *words: str) -> Any:
        done = subprocess.run(
            [sys.executable, "-m", "labctl", *words, "--json"],
            cwd=self.root,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        return json.loads(done.stdout)

    def list_alive(self) -> list[str]:
        return [name for name, state in self.cloud.instances.items() if state in ALIVE]

    def forget(self) -> None:
        """Delete all that this machine knows."""
        subprocess.run(["rm", "-rf", str(self.root.parent / "home" / ".local")], check=True)

    @contextmanager
    def hold(self, kind: str, action: str) -> Iterator[None]:
        """Hold the next call of an action, before its effect ("dropped") or after it ("lost")."""
        held = self.cloud.held_calls.get(action, 0)
        self.cloud.change(**{kind: (Loss(action=action, hold=HOLD_S),)})
        try:
            yield
            wait_for(lambda: self.cloud.held_calls.get(action, 0) > held, COMMAND_S)
        finally:
            self.cloud.change(**{kind: ()})

    def kill_at(self, kind: str, action: str, *words: str) -> None:
        """Kill a command while it waits for the reply to this call."""
        with self.hold(kind, action):
            process = self.start(*words)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        wait_for(lambda: not self.cloud.under_way, 30)
