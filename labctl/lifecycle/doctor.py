"""Is everything here that labctl needs? Each line says how to mend what is not."""

from __future__ import annotations

import shutil
import subprocess

from labctl.commands.probe import missing
from labctl.errors import LabError, NotFoundError
from labctl.model import Check
from labctl.servers.context import Ground
from labctl.servers.prepare import probe


def doctor(ground: Ground) -> list[Check]:
    """This machine, the provider, and the server if there is one."""
    return [*_here(), *_provider(ground), *_server(ground)]


def _here() -> list[Check]:
    if not shutil.which("ssh"):
        said = "not found; it serves forwards, attach and quick commands"
        mend = "sudo apt-get install openssh-client   (macOS: brew install openssh)"
        return [Check(name="ssh", ok=False, detail=said, next=mend)]
    done = subprocess.run(["ssh", "-V"], capture_output=True, text=True, check=False)
    said = (done.stdout or done.stderr).strip().splitlines()[0][:60]
    return [Check(name="ssh", ok=True, detail=said)]


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
