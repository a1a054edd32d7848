"""Share a lab server among several users: an account for each, and the broker between them."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from labctl.commands import ansible
from labctl.events import Reporter
from labctl.model import Server, Value
from labctl.servers.agent import build_program
from labctl.servers.connections import Connections
from labctl.servers.playbooks import run_playbook

PLAYBOOK = "shared.yml"
SLURM_PLAYBOOK = "slurm.yml"
# useradd refuses longer account names.
MOST_NAME = 32
KIB = 1024


class SharedAccount(Value, frozen=True):
    """An account on a shared server. `keys` are public key lines.

    An account without keys is disabled: nobody can log in, its processes stop, its files stay.
    `uid` is its number; 0 lets the server choose.
    """

    name: str
    keys: tuple[str, ...] = ()
    uid: int = 0


class Sharing(Value, frozen=True, kw_only=True):
    """How a server is shared. Memory is divided evenly among `places` accounts.

    Each account may lease `gpus` GPUs at once, for `gpu_lease_s`. `disk_bytes` limits a home
    directory if the file system has quotas; 0 sets no limit. With `has_queue` Slurm gives out the
    GPUs, and an account has containers only in its jobs. Homes are in `homes`; "" for the server's
    default.
    """

    places: int = 8
    gpus: int = 1
    gpu_lease_s: int = 4 * 3600
    disk_bytes: int = 0
    has_queue: bool = False
    homes: str = ""


class BrokerVariables(Value, frozen=True, kw_only=True):
    """The broker's own settings, as the playbook writes them to the server."""

    accounts: int
    gpus_per_account: int
    gpu_lease_s: int
    needs_job: bool


class SharedServerVariables(Value, frozen=True, kw_only=True):
    """The variables of playbooks/roles/shared_server."""

    shared_server_program: str
    shared_server_only_accounts: bool
    shared_server_accounts: tuple[SharedAccount, ...]
    shared_server_settings: BrokerVariables
    shared_server_quota_kib: int
    shared_server_homes: str


def account_name(name: str) -> str:
    """Return the account name of a student or team: unique, and never a system account."""
    account = "lab-" + re.sub(r"[^a-z0-9-]", "-", name.lower())
    if len(account) <= MOST_NAME:
        return account
    digest = hashlib.sha256(name.encode()).hexdigest()[:6]
    return f"{account[: MOST_NAME - 7]}-{digest}"


def share(
    server: Server,
    accounts: Sequence[SharedAccount],
    sharing: Sharing,
    *,
    playbooks_dir: Path,
    connections: Connections,
    reporter: Reporter,
    only_accounts: bool = False,
    sets_up_queue: bool = True,
    nodes: Sequence[Server] = (),
) -> None:
    """Create or change these accounts on the server, install the broker, and perhaps Slurm.

    Accounts that are not named stay as they are. `only_accounts`, which is faster, is for a server
    that is shared already. Without `sets_up_queue`, Slurm stays as it is. The login needs root, or
    sudo without a password. `nodes` are further servers of the same cluster, which share the homes.
    LabError names the task that failed.
    """
    host, *others = _make_hosts([server, *nodes], connections)
    with tempfile.NamedTemporaryFile(prefix="labctl-broker-", suffix=".zip") as file:
        file.write(build_program())
        file.flush()
        variables = SharedServerVariables(
            shared_server_program=file.name,
            shared_server_only_accounts=only_accounts,
            shared_server_accounts=tuple(accounts),
            shared_server_settings=BrokerVariables(
                accounts=sharing.places,
                gpus_per_account=sharing.gpus,
                gpu_lease_s=sharing.gpu_lease_s,
                needs_job=sharing.has_queue,
            ),
            shared_server_quota_kib=sharing.disk_bytes // KIB,
            shared_server_homes=sharing.homes,
        )
        run_playbook(host, playbooks_dir, reporter, name=PLAYBOOK, variables=variables)
        if others:
            # Not together with the first: only one of them must create the homes.
            run_playbook(
                others[0],
                playbooks_dir,
                reporter,
                name=PLAYBOOK,
                variables=variables,
                others=others[1:],
            )
    if sharing.has_queue and sets_up_queue and not only_accounts:
        set_up_queue(
            server,
            playbooks_dir=playbooks_dir,
            connections=connections,
            reporter=reporter,
            nodes=nodes,
        )


def set_up_queue(
    server: Server,
    *,
    playbooks_dir: Path,
    connections: Connections,
    reporter: Reporter,
    nodes: Sequence[Server] = (),
) -> None:
    """Set up Slurm on the server and its `nodes`, or start what of it does not run.

    The playbook's controller is the first host, which is the server. Safe to repeat.
    """
    host, *others = _make_hosts([server, *nodes], connections)
    run_playbook(host, playbooks_dir, reporter, name=SLURM_PLAYBOOK, others=others)


def _make_hosts(servers: Sequence[Server], connections: Connections) -> list[ansible.Host]:
    return [
        ansible.Host(
            alias=server.alias,
            ssh_config=connections.config_path(server.id),
            user=server.endpoint.user,
        )
        for server in servers
    ]
