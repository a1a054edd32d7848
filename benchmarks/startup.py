"""Start-up time of commands, until the first output."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from pathlib import Path

from benchmarks.measure import Call, Comparison, Row
from benchmarks.settings import Settings
from labctl.config import ensure_lab_id, find_paths
from labctl.model import Endpoint, Offer, Run, Server
from labctl.state import State

LABCTL = str(Path(sys.executable).with_name("labctl"))
BASELINE = 'python -c "import click"'
MANY_SERVERS = 1000
HELP = {
    "fabric": ("fab", "--help"),
    "pyinfra": ("pyinfra", "--help"),
    "ansible-core": ("ansible", "--version"),
    "skypilot": ("sky", "--help"),
    "dstack": ("dstack", "--help"),
}


def recorded_lab(home: Path, servers: int) -> Path:
    """Create a lab with `servers` servers on record, one of them its own, and three runs."""
    root = home / "digits"
    root.mkdir(parents=True)
    (root / "lab.yaml").write_text("lab: digits\nrun: python train.py\n")
    identity = ensure_lab_id(root)
    with State(find_paths({"HOME": str(home)}).database) as state:
        for number in range(servers):
            state.save_server(_server(number, identity if number == 0 else f"other{number:07d}"))
        for name in ("first", "second", "third"):
            run = Run(id=name, lab_id=identity, server_id="server-0", state="exited", exit_code=0)
            state.save_run(run)
    return root


def _server(number: int, identity: str) -> Server:
    return Server(
        id=f"server-{number}",
        provider="local",
        lab="digits",
        lab_id=identity,
        alias="digits",
        endpoint=Endpoint(host="127.0.0.1", user="student"),
        offer=Offer(provider="local", type="container"),
        state="running",
        created_at=time.time() - 3600,
    )


def compare(settings: Settings) -> Generator[Comparison]:
    """Compare the time of whole processes; the baseline imports click alone."""
    home = settings.home / "start-up"
    one = recorded_lab(home / "one", 1)
    many = recorded_lab(home / "many", MANY_SERVERS)
    rows = [
        _row(BASELINE, one, "1", sys.executable, "-c", "import click; print(1)"),
        _row("labctl --help", one, "forward", LABCTL, "--help", target=1.2),
        _row("labctl --version", one, "labctl ", LABCTL, "--version", target=1.2),
        _row("labctl status", one, "third", LABCTL, "status", target=2.0),
        _row(f"labctl status, {MANY_SERVERS} servers", many, "third", LABCTL, "status", target=2.0),
    ]
    rows[-1].against = rows[-2].name
    for package, (program, *words) in HELP.items():
        if peer := settings.peers.get(package):
            name = f"{program} {' '.join(words)} ({package} {peer.version})"
            rows.append(_row(name, one, "", peer.program(program), *words))
    yield Comparison("start of a process", rows, settings.sizes.rounds)


def _row(name: str, lab: Path, expects: str, *argv: str, target: float | None = None) -> Row:
    return Row(name, Call(argv, lab.parent, lab, expects), target)
