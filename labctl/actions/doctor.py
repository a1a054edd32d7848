"""Is everything here that labctl needs? Each line says how to mend what is not."""

from __future__ import annotations

import shutil
import subprocess

from labctl.actions.ground import Ground
from labctl.actions.prepare import probe
from labctl.commands.probe import missing
from labctl.errors import LabError, NotFoundError
from labctl.model import Check


def doctor(ground: Ground) -> list[Check]:
    """This machine, the provider, and the server if there is one."""
    return [*_here(), *_provider(ground), *_server(ground)]


def _here() -> list[Check]:
    checks = []
    for program, needed, package in (
        ("ssh", "forwards, attach and quick commands", "openssh-client"),
        ("rsync", "big and changed files", "rsync"),
    ):
        path = shutil.which(program)
        said = _version(program) if path else f"not found; it serves {needed}"
        mend = "" if path else f"sudo apt-get install {package}   (macOS: brew install {program})"
        checks.append(Check(name=program, ok=bool(path), detail=said, next=mend))
    return checks


def _version(program: str) -> str:
    flag = "-V" if program == "ssh" else "--version"
    done = subprocess.run([program, flag], capture_output=True, text=True, check=False)
    return (done.stdout or done.stderr).strip().splitlines()[0][:60]


def _provider(ground: Ground) -> list[Check]:
    try:
        return ground.provider.check(ground.config.server.need)
    except LabError as error:
        return [Check(name="provider", ok=False, detail=error.what, next=error.hint)]


def _server(ground: Ground) -> list[Check]:
    try:
        server = ground.server()
    except NotFoundError as error:
        return [Check(name="server", ok=True, detail=error.what)]
    try:
        facts = probe(ground.connections.open(server))
    except LabError as error:
        return [Check(name=server.alias, ok=False, detail=error.what, next=error.hint)]
    gpus = ", ".join(gpu.name for gpu in facts.gpus) or "no GPU"
    said = f"{facts.os}, Docker {facts.docker or 'missing'}, {facts.cpus} CPUs, {gpus}"
    lacking = [
        Check(name=server.alias, ok=False, detail=lack.words, next=lack.command)
        for lack in missing(facts)
    ]
    return [Check(name=server.alias, ok=not lacking, detail=said), *lacking]
