"""Checks of everything that labctl needs. Each failed check names the command that fixes it."""

from __future__ import annotations

import shutil
import subprocess

from labctl.commands.probe import list_missing
from labctl.errors import LabError, NotFoundError
from labctl.model import Check
from labctl.servers.context import LabContext
from labctl.servers.prepare import probe


def run_doctor(context: LabContext) -> list[Check]:
    """Check this machine, the provider, and the server if there is one."""
    return [*_check_ssh(), *_check_provider(context), *_check_server(context)]


def _check_ssh() -> list[Check]:
    if not shutil.which("ssh"):
        detail = "not found; forwards, attach and quick commands need it"
        fix = "sudo apt-get install openssh-client   # macOS: brew install openssh"
        return [Check(name="ssh", ok=False, detail=detail, next=fix)]
    done = subprocess.run(["ssh", "-V"], capture_output=True, text=True, check=False)
    version = (done.stdout or done.stderr).strip().splitlines()[0][:60]
    return [Check(name="ssh", ok=True, detail=version)]


def _check_provider(context: LabContext) -> list[Check]:
    try:
        return context.provider.check(context.config.server.need)
    except LabError as error:
        return [Check(name="provider", ok=False, detail=error.what, next=error.hint)]


def _check_server(context: LabContext) -> list[Check]:
    try:
        server = context.get_server()
    except NotFoundError as error:
        return [Check(name="server", ok=True, detail=error.what)]
    try:
        facts = probe(context.connections.open(server))
    except LabError as error:
        return [Check(name=server.alias, ok=False, detail=error.what, next=error.hint)]
    gpus = ", ".join(gpu.name for gpu in facts.gpus) or "no GPU"
    summary = f"{facts.os}, Docker {facts.docker or 'missing'}, {facts.cpus} CPUs, {gpus}"
    failures = [
        Check(name=server.alias, ok=False, detail=lack.words, next=lack.command)
        for lack in list_missing(facts)
    ]
    return [Check(name=server.alias, ok=not failures, detail=summary), *failures]
