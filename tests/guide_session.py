"""The project, the home and the runs in which the commands of docs/own-project.md are typed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
from transcripts import Session, make_session

from labctl.config import ensure_lab_id, find_paths
from labctl.insight.telemetry import TELEMETRY_FILE, GpuSample, Sample
from labctl.model import Endpoint, Run
from labctl.state import State

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "own-project.md"
PROJECT = ROOT / "tests" / "guide" / "birds"
GIB = 1024**3
OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.25 GiB. GPU 0 has a total "
    "capacity of 14.56 GiB of which 1.31 GiB is free.\n"
)


def make_guide_session(folder: Path) -> Session:
    """A project with two pulled runs of an earlier server: one left the GPU idle, one filled it."""
    made = make_session(folder, PROJECT, {})
    lab_id = ensure_lab_id(made.directory)
    idle = GpuSample(
        uuid="GPU-1", name="T4", use_percent=4.0, memory_bytes=GIB, memory_total_bytes=16 * GIB
    )
    save_run(made, lab_id, "slow", 0, "epoch 1\n", idle)
    full = msgspec.structs.replace(idle, use_percent=90.0, memory_bytes=15 * GIB)
    save_run(made, lab_id, "big", 1, OUT_OF_MEMORY, full)
    return made


def make_served_session(folder: Path, machine: Endpoint, image: str) -> Session:
    """Make a session in a lab that uses `machine`, and whose runs use `image` of its engine."""
    wheels = os.environ.get("LABCTL_WHEELHOUSE", "")
    session = make_session(folder, PROJECT, {"LABCTL_WHEELHOUSE": wheels} if wheels else {})
    settings = {
        "lab": PROJECT.name,
        "image": image,
        "data": {"birds": "photos"},
        "server": use_machine(session, folder, machine),
    }
    (session.directory / "lab.yaml").write_bytes(msgspec.json.encode(settings))
    # The code reads the data where runs have it, else `push` says that it does not.
    program = session.directory / "train.py"
    program.write_text(program.read_text().replace('"photos"', '"/lab/data/birds"'))
    return session


def use_machine(session: Session, folder: Path, machine: Endpoint) -> dict[str, object]:
    """Let the session in `folder` trust `machine`; return the setting `server` that names it."""
    trust_machine(session, folder, machine)
    host = {
        "host": machine.host,
        "port": machine.port,
        "user": machine.user,
        "identity": machine.identity,
    }
    return {"provider": "static", "static": {"hosts": [host]}}


def trust_machine(session: Session, folder: Path, machine: Endpoint) -> None:
    """Let the session in `folder` know the host key of `machine`.

    The `ssh` of the session reads the home's configuration, and not that of the account.
    """
    ssh_dir = Path(session.environ["HOME"]) / ".ssh"
    ssh_dir.mkdir(mode=0o700)
    (ssh_dir / "known_hosts").write_text(f"[{machine.host}]:{machine.port} {machine.host_key}\n")
    (ssh_dir / "config").touch()
    program = folder / "bin" / "ssh"
    program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {ssh_dir}/config "$@"\n')
    program.chmod(0o755)


def save_run(
    session: Session,
    lab_id: str,
    run_id: str,
    code: int,
    log: str,
    gpu: GpuSample,
    command: tuple[str, ...] = ("python", "train.py", "--batch-size", "64"),
) -> None:
    run = Run(
        id=run_id,
        lab_id=lab_id,
        server_id="gone",
        state="exited",
        exit_code=code,
        summary=f"failed with exit code {code}" if code else "done",
        command=command,
        started_at=1000.0,
        ended_at=1600.0,
        created_at=1000.0,
    )
    with State(find_paths({"HOME": session.environ["HOME"]}).database) as state:
        state.save_run(run)
    logs = session.directory / "runs" / run_id / "logs"
    logs.mkdir(parents=True)
    samples = (
        Sample(at=1000.0 + 10 * n, cpu_cores=1.0, cores=8.0, memory_bytes=2 * GIB, gpus=(gpu,))
        for n in range(60)
    )
    lines = [msgspec.json.encode(sample).decode() for sample in samples]
    (logs / TELEMETRY_FILE).write_text("\n".join(lines) + "\n")
    (logs / "run.log").write_text(log)
