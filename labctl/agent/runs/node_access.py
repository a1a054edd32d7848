"""SSH to the machine of a job, over a step of the job.

A cluster may refuse logins to its machines. A step can run OpenSSH's server as this user for one
connection, with its standard streams as the line: so a forward has all that OpenSSH does. It opens
ports of that machine's loopback, and no shell. Its keys are below ~/labctl/.node-access.
"""

from __future__ import annotations

import fcntl
import re
import shlex
from pathlib import Path

from ...wire.node_access import NodeAccess
from ..host.docker import run_program
from ..host.paths import labctl_home, read_text, write_text
from ..reply import Failure
from .slurm_commands import build_stream_words

_KEY = re.compile(r"ssh-ed25519 [A-Za-z0-9+/]+=*")
_CONFIG = """\
HostKey {directory}/host_key
AuthorizedKeysFile {directory}/authorized_keys
StrictModes no
UsePAM no
PidFile none
AuthenticationMethods publickey
AllowTcpForwarding local
PermitOpen localhost:* 127.0.0.1:*
AllowStreamLocalForwarding local
AllowAgentForwarding no
X11Forwarding no
PermitTTY no
PermitTunnel no
ForceCommand exit 1
ClientAliveInterval 15
ClientAliveCountMax 4
LogLevel ERROR
"""
# The directories of system programs are not on the PATH of users.
_SERVE = 'PATH=$PATH:/usr/sbin:/usr/local/sbin; exec "$(command -v sshd)" -i -e -f "$1"'


def build_node_access(job_id: str, run: str, client_key: str) -> NodeAccess:
    """Let a client's public key in, and return the way to the machine of a run's job."""
    match = _KEY.match(client_key)
    if match is None:
        raise Failure("usage", "the client sent no public key for the machine of the run")
    directory = labctl_home() / ".node-access"
    directory.mkdir(mode=0o700, exist_ok=True)
    host_key = _ensure_host_key(directory)
    keys = directory / "authorized_keys"
    line = f"restrict,port-forwarding {match.group()}"
    # Two clients may come at the same time.
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lines = read_text(keys).splitlines()
        if line not in lines:
            write_text(keys, "\n".join([*lines, line, ""]), 0o600)
    write_text(directory / "sshd_config", _CONFIG.format(directory=directory), 0o600)
    serve = ["sh", "-c", _SERVE, "sshd", str(directory / "sshd_config")]
    return NodeAccess(shlex.join(build_stream_words(job_id, serve)), host_key, run)


def _ensure_host_key(directory: Path) -> str:
    """Return the public key of the SSH server, which is made once."""
    path = directory / "host_key"
    if not path.exists():
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "labctl", "-f", str(path)]
        done = run_program(words, stdin="n\n")
        if done.returncode and not path.exists():
            what = "the login node could not make a key for the machine of the run"
            raise Failure("server", what, done.stderr.strip()[-500:], "labctl doctor")
    return read_text(path.with_name("host_key.pub"))
