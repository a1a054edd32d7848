"""Turn a machine that answers SSH into a lab server, and find out what it can do.

A server that lacks nothing costs one round trip, the probe. Otherwise the playbook runs, in a
separate Ansible process, and leaves its content hash as a stamp on the server.
"""

from __future__ import annotations

from pathlib import Path

from labctl.commands import ansible
from labctl.commands.probe import (
    SCRIPT,
    MissingRequirement,
    list_admin_commands,
    list_missing,
    parse,
)
from labctl.errors import LabError, PolicyError
from labctl.events import BlockerNote, Note, Reporter
from labctl.model import Server, ServerFacts
from labctl.servers.playbooks import LOG_NAME, run_playbook
from labctl.shell import command
from labctl.transports import Transport

PROBE_TIMEOUT_S = 90.0


def probe(transport: Transport) -> ServerFacts:
    """Collect the server's ServerFacts in one round trip. LabError if it cannot run a script."""
    result = transport.run(
        command("sh", "-s"), stdin=SCRIPT.encode(), timeout_s=PROBE_TIMEOUT_S, check=False
    )
    noise = result.noise + "\n" if result.noise.strip() else ""
    return parse(noise + result.stdout, result.stderr)


def playbook_hash(playbooks_dir: Path) -> str:
    """Return the content hash of all files that decide what the playbook does to a server."""
    files = {
        path.relative_to(playbooks_dir).as_posix(): path.read_bytes()
        for path in playbooks_dir.rglob("*.yml")
    }
    return ansible.compute_stamp(files)


def prepare(
    transport: Transport,
    server: Server,
    facts: ServerFacts | None,
    *,
    playbooks_dir: Path,
    ssh_config: Path,
    reporter: Reporter,
    boto3: bool = False,
    docker: bool = True,
    name: str = "",
) -> ServerFacts:
    """Install on the server what labctl needs, and return its ServerFacts afterwards.

    `facts` is the result of a `probe` just before, None to probe here. Returns at once if nothing
    is missing, or if this same playbook has already run and can do no more (a GPU without NVIDIA's
    repository, a daemon that something else starts), which is reported as a Note. Otherwise runs
    the playbook, which needs root or sudo without a password; its log is next to `ssh_config`.
    Raises PolicyError with the administrator's commands if the account lacks these rights,
    LabError with the failed task, ConnectError.
    `boto3` is for a server that saves its results by itself; one that cannot is reported, and
    stays usable. Without `docker`, runs are plain processes. Errors call the server `name`, or its
    alias.
    """
    name = name or server.alias
    facts = facts or probe(transport)
    plain_stamp = playbook_hash(playbooks_dir)
    boto3_stamp = f"{plain_stamp} boto3"
    stamp = boto3_stamp if boto3 else plain_stamp
    lacking = list_missing(facts, boto3=boto3, docker=docker)
    if not _should_run_playbook(lacking, done_before=facts.stamp in (stamp, boto3_stamp)):
        _report_missing(lacking, reporter)
        return facts
    if not (facts.sudo or facts.uid == 0):
        if all(lack.optional for lack in lacking):
            _report_missing(lacking, reporter)
            return facts
        raise _make_needs_admin_error(name, server, facts, lacking, playbooks_dir)
    host = ansible.Host(
        alias=server.alias,
        ssh_config=ssh_config,
        user=server.endpoint.user,
        stamp=stamp,
        boto3=boto3,
    )
    run_playbook(host, playbooks_dir, reporter, server_name=name)
    # A login from before the playbook keeps the groups that the account had then.
    transport.close()
    after = probe(transport)
    still_lacking = list_missing(after, boto3=boto3, docker=docker)
    if any(can_playbook_fix(lack) for lack in still_lacking):
        raise _make_incomplete_error(name, still_lacking, ssh_config)
    _report_missing(still_lacking, reporter)
    return after


def check_login_node(facts: ServerFacts, reporter: Reporter) -> None:
    """Report what a login node lacks, on which labctl installs nothing.

    PolicyError if the agent cannot run there.
    """
    lacking = list_missing(facts, docker=False, sessions=False)
    required = [lack.words for lack in lacking if not lack.optional]
    if required:
        raise PolicyError(
            f"labctl cannot use this login node: {'; '.join(required)}",
            why="labctl installs nothing on a cluster",
            hint="load a module with Python in your ~/.bashrc there, or ask its administrator",
        )
    for lack in lacking:
        text = f"{lack.words} on the login node, so `labctl attach` does not work"
        reporter.emit(Note(text=text))


def can_playbook_fix(lack: MissingRequirement) -> bool:
    """Whether the playbook fixes it on every server and for every account."""
    return not lack.optional and lack.name != "docker daemon"


def _should_run_playbook(lacking: list[MissingRequirement], *, done_before: bool) -> bool:
    return any(can_playbook_fix(lack) for lack in lacking) if done_before else bool(lacking)


def _report_missing(lacking: list[MissingRequirement], reporter: Reporter) -> None:
    for lack in lacking:
        words = lack.words.rstrip(".")  # docker's own message may end the sentence
        effect = "" if lack.optional else "no run can start yet: "
        end = "" if words.endswith("?") else "."
        text = f"{effect}{words}{end} To fix it:\n    {lack.command}"
        make_note = Note if lack.optional else BlockerNote
        reporter.emit(make_note(text=text, level="warning"))


def _make_needs_admin_error(
    name: str,
    server: Server,
    facts: ServerFacts,
    lacking: list[MissingRequirement],
    playbooks_dir: Path,
) -> LabError:
    required = [lack for lack in lacking if not lack.optional]
    lines = [f"- {lack.words}" for lack in required]
    lines.append(f"the account {facts.user} may not use sudo without a password.")
    lines.append(f"An administrator of {server.endpoint.host} must run there:")
    lines += [f"    {line}" for line in list_admin_commands(required)]
    playbook = str(playbooks_dir / "server.yml")
    play = command("ansible-playbook", "-i", "hosts", playbook, "-K")
    return PolicyError(
        f"{name} is not ready for labctl, and {facts.user} may not change it",
        why="\n".join(lines),
        hint="send these lines to the administrator, or, if you know the sudo password:\n"
        f"labctl inventory > hosts\n{play.render()}",
    )


def _make_incomplete_error(
    name: str, lacking: list[MissingRequirement], ssh_config: Path
) -> LabError:
    return LabError(
        f"{name} is still incomplete after its preparation",
        why="\n".join(lack.words for lack in lacking),
        hint=f"less {ssh_config.parent / LOG_NAME}",
    )
