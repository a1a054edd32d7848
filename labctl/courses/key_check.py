"""Whether the keeper's sshd lets every student's key in, without one private key.

A client may ask an sshd whether a key would do before it signs with it. So each public key is
asked about at the address, and under the pinned host key, that students have.
"""

from __future__ import annotations

import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from labctl.config.course_schema import KeeperConfig
from labctl.courses.keys import Keys
from labctl.courses.publish import known_host_key
from labctl.courses.records.folder import CourseFolder
from labctl.errors import ConnectError
from labctl.servers.fan_out import LOGINS_AT_ONCE

ALIAS = "labctl-keeper"
TIMEOUT_S = 30.0
TAKEN, REFUSED = "Server accepts key", "Permission denied"


def not_let_in(folder: CourseFolder, keys: Keys) -> list[str]:
    """Students whose line is in authorized_keys, and whose key the keeper's sshd does not take.

    ConnectError where the keeper cannot be asked, or shows another host key than the pinned one.
    """
    keeper, publics = folder.config.keeper, keys.publics()
    if keeper is None or not publics:
        return []
    with tempfile.TemporaryDirectory() as place:
        known = Path(place) / "known_hosts"
        known.write_text(f"{ALIAS} {known_host_key(folder)}\n")

        def taken(student: str) -> bool:
            public = Path(place) / f"{student}.pub"
            public.write_text(f"{publics[student]}\n")
            return _taken(keeper, public, known)

        with ThreadPoolExecutor(LOGINS_AT_ONCE) as threads:
            answers = list(threads.map(taken, publics))
    return [student for student, good in zip(publics, answers, strict=True) if not good]


def _taken(keeper: KeeperConfig, public: Path, known: Path) -> bool:
    """Whether sshd would go on with this key. The login fails, for want of the private one."""
    options = [
        "BatchMode=yes",
        "IdentitiesOnly=yes",
        "IdentityAgent=none",
        f"IdentityFile={public}",
    ]
    options += ["PreferredAuthentications=publickey", f"HostKeyAlias={ALIAS}"]
    options += [f"UserKnownHostsFile={known}", "GlobalKnownHostsFile=none", "ConnectTimeout=10"]
    options += ["StrictHostKeyChecking=yes", "ConnectionAttempts=2"]
    words = ["ssh", "-v", "-F", "none", "-T", "-p", str(keeper.port)]
    words += [word for option in options for word in ("-o", option)]
    try:
        done = subprocess.run(
            [*words, "--", f"{keeper.user}@{keeper.host}", "true"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _unasked(keeper, str(error)) from None
    if TAKEN in done.stderr:
        return True
    if REFUSED in done.stderr:
        return False
    said = [one for one in done.stderr.splitlines() if not one.startswith(("debug", "OpenSSH"))]
    raise _unasked(keeper, "\n".join(said[-2:]))


def _unasked(keeper: KeeperConfig, why: str) -> ConnectError:
    return ConnectError(
        f"the keeper's sshd at {keeper.host}:{keeper.port} cannot be asked",
        why=why,
        hint=f"ssh -p {keeper.port} {keeper.user}@{keeper.host}   # as students reach it",
    )
