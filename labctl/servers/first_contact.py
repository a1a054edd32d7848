"""Replace the temporary host key of a new machine, over the connection that this key has verified.

The first key came with the machine's first-boot script, which others in the account may read. So:
create the next key there, pin both, switch sshd to it, verify it with a separate login, drop the
old one. If labctl is killed between any two of these steps, a key that the machine presents is
still pinned.
"""

from __future__ import annotations

import msgspec

from labctl.commands.root import as_root
from labctl.errors import ConnectError, HostKeyError, LabError
from labctl.errors.subject import Subject
from labctl.model import Server
from labctl.providers import FirstBoot
from labctl.retry import retry_on
from labctl.servers.connections import Connections
from labctl.servers.context import LabContext
from labctl.transports import Transport

# seconds to wait for sshd to use its new key; it reloads within a moment
SWITCH_S = 15.0
PAUSE_S = 0.1

_NEXT_KEY_SCRIPT = """set -e; umask 077
here=/etc/ssh/ssh_host_ed25519_key; next=/etc/ssh/labctl_next_key
of() { ssh-keygen -y -f "$1" | cut -d' ' -f1,2; }
if [ "$(of $here)" = "$1" ] && ! ssh-keygen -y -f $next >/dev/null 2>&1; then
  rm -f $next $next.pub; ssh-keygen -q -t ed25519 -N '' -C '' -f $next
fi
echo "here $(of $here)"; [ ! -e $next ] || echo "next $(of $next)"
"""
_SWITCH_SCRIPT = """set -e; umask 077
here=/etc/ssh/ssh_host_ed25519_key; next=/etc/ssh/labctl_next_key
[ ! -e $next ] || mv -f $next $here
ssh-keygen -y -f $here > $here.pub.new; chmod 644 $here.pub.new; mv -f $here.pub.new $here.pub
rm -f $next.pub
systemctl reload ssh 2>/dev/null || systemctl reload sshd 2>/dev/null ||
  kill -HUP "$(cat /run/sshd.pid 2>/dev/null || cat /var/run/sshd.pid)"
"""


def replace_first_host_key(
    context: LabContext, server: Server, transport: Transport
) -> tuple[Server, Transport]:
    """Give the server a host key that only it knows; return it with that key pinned.

    The returned transport checks the pinned key. Safe to repeat: an interrupted replacement
    continues, a finished one changes nothing.
    """
    provider = context.provider
    if not isinstance(provider, FirstBoot) or _is_settled(context, server):
        return server, transport
    first = server.endpoint.host_key
    present, following = _make_next_key(transport, first)
    if present not in ("", first) and not following:
        following = present
    if not following:
        raise LabError(
            "the server's first host key could not be replaced",
            why="no new key could be created on the server",
            hint=_try_again,
        )
    if not server.endpoint.next_host_key:
        provider.pin(server.id, first, following)
        server = _pin(context, server, first, following)
    _run_as_root(transport, _SWITCH_SCRIPT)
    _verify(context.connections, server, following)
    provider.pin(server.id, following)
    server = _pin(context, server, following, "")
    context.state.record("host-key", lab_id=context.lab_id, server_id=server.id)
    return server, context.connections.reopen(server)


def _is_settled(context: LabContext, server: Server) -> bool:
    """Whether the pinned key is no longer the one that the first-boot script brought."""
    if server.endpoint.next_host_key:
        return False
    return bool(context.state.list_events(server_id=server.id, kind="host-key", limit=1))


def _make_next_key(transport: Transport, first: str) -> tuple[str, str]:
    """Create the next key if sshd still has the first; (the key that sshd has, the next or "")."""
    output = _run_as_root(transport, _NEXT_KEY_SCRIPT, first)
    keys = dict(line.split(" ", 1) for line in output.splitlines() if " " in line)
    return keys.get("here", ""), keys.get("next", "")


def _try_again(subject: Subject) -> str:
    return f"{subject.up}   # again\n{subject.down}   # removes the server"


def _run_as_root(transport: Transport, script: str, *words: str) -> str:
    result = transport.run(as_root(script, *words), timeout_s=60.0, check=False)
    if result.code != 0:
        raise LabError(
            "the server's first host key could not be replaced",
            why=result.stderr.strip()[-500:],
            hint=_try_again,
        )
    return result.stdout


def _pin(context: LabContext, server: Server, first: str, following: str) -> Server:
    """Record these keys as the server's pinned ones, and write its ssh_config."""
    endpoint = msgspec.structs.replace(server.endpoint, host_key=first, next_host_key=following)
    server = msgspec.structs.replace(server, endpoint=endpoint)
    context.state.save_server(server)
    context.connections.write(server)
    return server


def _verify(connections: Connections, server: Server, key: str) -> None:
    """Log in with `key` as the only pinned key; raise HostKeyError or ConnectError."""
    only_new_key = msgspec.structs.replace(
        server,
        endpoint=msgspec.structs.replace(server.endpoint, host_key=key, next_host_key=""),
    )

    def log_in() -> None:
        connections.close(only_new_key)
        connections.open(only_new_key).run("true", timeout_s=SWITCH_S)

    refusals = (HostKeyError, ConnectError)
    policy = retry_on(refusals, pause_s=PAUSE_S, deadline_s=SWITCH_S)
    try:
        policy(log_in)
    except refusals:
        connections.write(server)
        raise
