"""The throw-away host key of a new machine is replaced over the channel that it proved.

The first key came with the machine's first-boot script, which others in the account may read. So:
make the next key there, pin both, switch sshd to it, prove it with a login of its own, drop the
old. A kill between any two of these leaves a key pinned that the machine presents.
"""

from __future__ import annotations

import shlex

import msgspec

from labctl.errors import ConnectError, HostKeyError, LabError
from labctl.model import Server
from labctl.providers import FirstBoot
from labctl.retry import retry_on
from labctl.servers.connections import Connections
from labctl.servers.context import Ground
from labctl.transports import Transport

# sshd reads its keys anew within a moment of being told.
SWITCH_S = 15.0
PAUSE_S = 0.1

_LOOK = """set -e; umask 077; here=/etc/ssh/ssh_host_ed25519_key; next=/etc/ssh/labctl_next_key
of() { ssh-keygen -y -f "$1" | cut -d' ' -f1,2; }
if [ "$(of $here)" = "$1" ] && ! ssh-keygen -y -f $next >/dev/null 2>&1; then
  rm -f $next $next.pub; ssh-keygen -q -t ed25519 -N '' -C '' -f $next
fi
echo "here $(of $here)"; [ ! -e $next ] || echo "next $(of $next)"
"""
_SWITCH = """set -e; umask 077; here=/etc/ssh/ssh_host_ed25519_key; next=/etc/ssh/labctl_next_key
[ ! -e $next ] || mv -f $next $here
ssh-keygen -y -f $here > $here.pub.new; chmod 644 $here.pub.new; mv -f $here.pub.new $here.pub
rm -f $next.pub
systemctl reload ssh 2>/dev/null || systemctl reload sshd 2>/dev/null ||
  kill -HUP "$(cat /run/sshd.pid 2>/dev/null || cat /var/run/sshd.pid)"
"""


def settle(ground: Ground, server: Server, transport: Transport) -> Server:
    """The server with a host key that only it knows. Repeated, it goes on or changes nothing."""
    provider = ground.provider
    if not isinstance(provider, FirstBoot) or _is_settled(ground, server):
        return server
    first = server.endpoint.host_key
    present, following = _look(transport, first)
    if present not in ("", first) and not following:
        following = present
    if not following:
        raise LabError(
            "the server's first host key could not be replaced",
            why="no new key could be made there",
            hint="labctl up tries again; labctl down removes the server",
        )
    if not server.endpoint.next_host_key:
        provider.pin(server.id, first, following)
        server = _pinned(ground, server, first, following)
    _as_root(transport, _SWITCH)
    _prove(ground.connections, server, following)
    provider.pin(server.id, following)
    server = _pinned(ground, server, following, "")
    ground.state.record("host-key", lab_id=ground.lab_id, server_id=server.id)
    return server


def _is_settled(ground: Ground, server: Server) -> bool:
    """Whether the pinned key is no longer the one that the first-boot script brought."""
    if server.endpoint.next_host_key:
        return False
    return bool(ground.state.events(server_id=server.id, kind="host-key", limit=1))


def _look(transport: Transport, first: str) -> tuple[str, str]:
    """(the key that sshd has, the one that is to follow or "")."""
    found = dict(
        line.split(" ", 1) for line in _as_root(transport, _LOOK, first).splitlines() if " " in line
    )
    return found.get("here", ""), found.get("next", "")


def _as_root(transport: Transport, script: str, *words: str) -> str:
    line = shlex.join(["sh", "-c", script, "sh", *words])
    done = transport.run(f"sudo -n {line}", timeout_s=60.0, check=False)
    if done.code != 0:
        raise LabError(
            "the server's first host key could not be replaced",
            why=done.stderr.strip()[-500:],
            hint="labctl up tries again; labctl down removes the server",
        )
    return done.stdout


def _pinned(ground: Ground, server: Server, first: str, following: str) -> Server:
    endpoint = msgspec.structs.replace(server.endpoint, host_key=first, next_host_key=following)
    server = msgspec.structs.replace(server, endpoint=endpoint)
    ground.state.save_server(server)
    ground.connections.write(server)
    return server


def _prove(connections: Connections, server: Server, key: str) -> None:
    """A login of its own on which the server presents `key` and nothing else."""
    alone = msgspec.structs.replace(
        server,
        endpoint=msgspec.structs.replace(server.endpoint, host_key=key, next_host_key=""),
    )

    def log_in() -> None:
        connections.close(alone)
        connections.open(alone).run("true", timeout_s=SWITCH_S)

    refusals = (HostKeyError, ConnectError)
    policy = retry_on(refusals, pause_s=PAUSE_S, deadline_s=SWITCH_S)
    try:
        policy(log_in)
    except refusals:
        connections.write(server)
        raise
