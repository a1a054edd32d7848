"""Checks of everything that labctl needs. Each failed check names the command that fixes it."""

from __future__ import annotations

from collections.abc import Callable

from labctl.commands.probe import MissingRequirement, list_missing, list_slow_parts
from labctl.commands.systemd import UNIT
from labctl.config import Paths
from labctl.config.lab import SAMPLE
from labctl.errors import LabError, NotFoundError
from labctl.errors.replies import describe_error
from labctl.lifecycle.keeper_host import KeeperHost
from labctl.lifecycle.kept_labs import list_kept_labs
from labctl.lifecycle.recovery_lock import find_keeper
from labctl.model import Check, Server, ServerFacts
from labctl.servers.adoption import suggest_other_machine
from labctl.servers.clock import list_clock_checks
from labctl.servers.context import LabContext
from labctl.servers.deadlines import is_guarded_elsewhere
from labctl.servers.job_queue import has_job_queue
from labctl.servers.prepare import can_playbook_fix, probe
from labctl.servers.unused_providers import list_unused_provider_checks


def list_lab_checks(context: LabContext) -> list[Check]:
    """Check the providers, the lab's server if there is one, and the lab's keeper."""
    providers = [*_check_provider(context), *list_unused_provider_checks(context)]
    if not context.config.path.exists():
        has_code = any(context.config.path.parent.glob("*.py"))
        start = "labctl init   # writes one for your code" if has_code else SAMPLE
        detail = "not checked, because this directory has no lab.yaml"
        return [*providers, Check(name="lab", ok=True, skipped=True, detail=detail, next=start)]
    return [
        *providers,
        *_check_server(context),
        *_check_lab_keeper(context),
    ]


def check_own_keeper(paths: Paths, is_running: Callable[[Paths], bool]) -> list[Check]:
    """Check the keeper of this machine; nothing if no lab was handed over to it."""
    labs = list_kept_labs(paths)
    if not labs:
        return []
    count = f"{len(labs)} lab{'s' if len(labs) > 1 else ''}"
    if is_running(paths):
        return [Check(name="keeper here", ok=True, detail=f"watches over {count}")]
    return [
        Check(
            name="keeper here",
            ok=False,
            detail=f"not running, although it has to watch over {count}",
            next=f"systemctl --user enable --now {UNIT}\n"
            "labctl keep --install   # if there is no such unit",
        )
    ]


def _check_provider(context: LabContext) -> list[Check]:
    try:
        clock = list_clock_checks(context.provider)
        return [*clock, *context.provider.check(context.config.server.need)]
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
        suggest_other_machine(context, error)
        return [Check(name=server.alias, ok=False, detail=describe_error(error), next=error.hint)]
    gpus = ", ".join(gpu.name for gpu in facts.gpus) or "no GPU"
    no_docker = "missing" if facts.docker_fault == "missing" else "not usable"
    docker = f", Docker {facts.docker or no_docker}"
    is_login_node = has_job_queue(context)
    summary = f"{facts.os}{'' if is_login_node else docker}, {facts.cpus} CPUs, {gpus}"
    lacking = [
        Check(
            name=server.alias,
            ok=lack.optional,
            warning=lack.optional,
            detail=lack.words,
            next=_suggest_fix(context, server, facts, lack),
        )
        for lack in [
            *list_missing(facts, docker=context.config.uses_containers, sessions=not is_login_node),
            *list_slow_parts(facts),
        ]
    ]
    is_usable = all(check.ok for check in lacking)
    return [Check(name=server.alias, ok=is_usable, detail=summary), *lacking]


def _suggest_fix(
    context: LabContext, server: Server, facts: ServerFacts, lack: MissingRequirement
) -> str:
    """Return the command that the user types on this machine, or an administrator on the server."""
    is_administrator = facts.sudo or facts.uid == 0
    if is_administrator and can_playbook_fix(lack):
        return f"{context.subject.up}   # installs it"
    if is_administrator and lack.command.startswith("sudo "):
        return context.subject.ssh(lack.command)
    return f"{lack.command}   # on {server.endpoint.host}, by an administrator"


def _check_lab_keeper(context: LabContext) -> list[Check]:
    """Check that the keeper that the lab was handed over to answers."""
    host = find_keeper(context)
    if not host and is_guarded_elsewhere(context.provider):
        return []  # the provider's checks are those of the course's keeper
    if not host:
        detail = "none for this lab; interrupted runs are recovered only while this machine is on"
        return [Check(name="keeper", ok=True, detail=detail)]
    try:
        info = KeeperHost(context, host).fetch_inventory()
    except LabError as error:
        return [
            Check(name="keeper", ok=False, detail=describe_error(error), next=error.hint),
        ]
    return [Check(name="keeper", ok=True, detail=f"{host} answers, labctl {info.version}")]
