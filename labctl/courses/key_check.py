"""A check that the keeper's sshd accepts every student's key, without the private keys.

An SSH client may ask whether a public key is acceptable before it signs with it. This check does so
for each key, at the address and with the pinned host key that students use.
"""

from __future__ import annotations

import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from labctl.config.course_schema import KeeperConfig
from labctl.courses.keys import AuthorizedKeys
from labctl.courses.publish import read_host_key
from labctl.courses.records.folder import CourseFolder
from labctl.errors import ConnectError
from labctl.servers.fan_out import LOGINS_AT_ONCE

ALIAS = "labctl-keeper"
TIMEOUT_S = 30.0
# parts of ssh's messages: its exit code is 255 for every error
ACCEPTED_LINE, REFUSED_LINE = "Server accepts key", "Permission denied"


def find_rejected_students(folder: CourseFolder, keys: AuthorizedKeys) -> list[str]:
    """List students with a line in authorized_keys whose key the keeper's sshd rejects.

    ConnectError if the keeper cannot be reached, or shows another host key than the pinned one.
    """
    keeper, publics = folder.config.keeper, keys.read_public_keys()
    if keeper is None or not publics:
        return []
    with tempfile.TemporaryDirectory() as directory:
        known_hosts = Path(directory) / "known_hosts"
        known_hosts.write_text(f"{ALIAS} {read_host_key(folder)}\n")

        def is_key_accepted(number: int) -> bool:
            public = Path(directory) / f"{number}.pub"
            public.write_text(f"{publics[number][1]}\n")
            return _is_accepted(keeper, public, known_hosts)

        with ThreadPoolExecutor(LOGINS_AT_ONCE) as threads:
            accepted = list(threads.map(is_key_accepted, range(len(publics))))
    rejected = [
        student
        for (student, _), is_accepted in zip(publics, accepted, strict=True)
        if not is_accepted
    ]
    return list(dict.fromkeys(rejected))


def _is_accepted(keeper: KeeperConfig, public: Path, known_hosts: Path) -> bool:
    """Tell whether sshd accepts this key. The login itself fails without the private key."""
    options = [
        "BatchMode=yes",
        "IdentitiesOnly=yes",
        "IdentityAgent=none",
        f"IdentityFile={public}",
    ]
    options += ["PreferredAuthentications=publickey", f"HostKeyAlias={ALIAS}"]
    options += [
        f"UserKnownHostsFile={known_hosts}",
        "GlobalKnownHostsFile=none",
        "ConnectTimeout=10",
    ]
    options += ["StrictHostKeyChecking=yes", "ConnectionAttempts=2"]
    words = ["ssh", "-v", "-F", "none", "-T", "-p", str(keeper.port)]
    words += [word for option in options for word in ("-o", option)]
    try:
        result = subprocess.run(
            [*words, "--", f"{keeper.user}@{keeper.host}", "true"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _make_unreachable_error(keeper, str(error)) from None
    if ACCEPTED_LINE in result.stderr:
        return True
    if REFUSED_LINE in result.stderr:
        return False
    noise = ("debug", "OpenSSH")
    lines = [line for line in result.stderr.splitlines() if not line.startswith(noise)]
    raise _make_unreachable_error(keeper, "\n".join(lines[-2:]))


def _make_unreachable_error(keeper: KeeperConfig, why: str) -> ConnectError:
    return ConnectError(
        f"the keeper's sshd at {keeper.host}:{keeper.port} cannot be reached",
        why=why,
        hint=f"ssh -p {keeper.port} {keeper.user}@{keeper.host}   # as students connect",
    )
