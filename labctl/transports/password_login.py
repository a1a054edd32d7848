"""Logs in with a password, once, to authorize a key: what ssh-copy-id does.

A password is sent only to a machine that presents the endpoint's pinned host key, and is kept in
memory only.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import paramiko

from labctl.errors import AuthenticationError, LabError
from labctl.model import Endpoint
from labctl.shell import Secret, command, portable_line
from labctl.transports import failures
from labctl.transports.fabric_login import Login, log_in

# The methods of SSH (RFC 4252, RFC 4256) that a password can answer.
PASSWORD = "password"
INTERACTIVE = "keyboard-interactive"
# Directory services and PAM's delay after a wrong password can take long.
AUTHENTICATION_TIMEOUT_S = 30.0
COMMAND_TIMEOUT_S = 30.0

# sshd ignores the file if other users can write to it or to its directory.
_AUTHORIZE = r"""cd && umask 077 && mkdir -p .ssh && chmod go-w .ssh || exit 1
file=.ssh/authorized_keys
touch "$file" && chmod go-w "$file" || exit 1
if grep -v '^[[:space:]]*#' "$file" | grep -qF -- "$1"; then exit 0; fi
if [ -n "$(tail -c 1 "$file")" ]; then echo >> "$file" || exit 1; fi
printf '%s\n' "$2" >> "$file"
"""


def list_login_methods(endpoint: Endpoint, known_hosts: Path | None = None) -> frozenset[str]:
    """Return the methods with which this user may log in, such as "publickey" and "password".

    Raises the ConnectError family and HostKeyError.
    """
    query = _MethodQuery(endpoint)
    log_in(endpoint, known_hosts, query).close()
    return query.methods


def authorize_key(
    endpoint: Endpoint, password: Secret, public_key: str, known_hosts: Path | None = None
) -> None:
    """Log in with the password and add a public key to ~/.ssh/authorized_keys, once.

    AuthenticationError for a wrong password, LabError if the machine asks for more than that.
    """
    login = log_in(endpoint, known_hosts, _PasswordLogin(endpoint, password))
    try:
        _append_key(login, endpoint, public_key)
    finally:
        login.close()


class _MethodQuery:
    """Asks sshd for its methods, and leaves the connection without a login."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._user = endpoint.user
        self.methods: frozenset[str] = frozenset()

    def authenticate(self, transport: paramiko.Transport) -> None:
        self.methods = frozenset(_list_methods(transport, self._user))


class _PasswordLogin:
    """Logs in with a password, or with it as the answer to the only question that sshd asks."""

    def __init__(self, endpoint: Endpoint, password: Secret) -> None:
        self._endpoint = endpoint
        self._password = password
        self._unanswered = False
        self._answered = False

    def authenticate(self, transport: paramiko.Transport) -> None:
        transport.auth_timeout = AUTHENTICATION_TIMEOUT_S
        user = self._endpoint.user
        methods = _list_methods(transport, user)
        try:
            if transport.is_authenticated():
                missing: list[str] = []
            elif PASSWORD in methods:
                missing = transport.auth_password(user, self._password.reveal(), fallback=False)
            else:
                missing = transport.auth_interactive(user, self._answer)
        except paramiko.AuthenticationException as error:
            if self._unanswered:
                raise _make_second_factor_error(self._endpoint) from error
            raise AuthenticationError(
                f"{failures.endpoint_text(self._endpoint)} does not accept the password",
                endpoint=self._endpoint,
            ) from error
        if missing:
            raise _make_second_factor_error(self._endpoint)

    def _answer(
        self, title: str, instructions: str, prompts: Sequence[tuple[str, bool]]
    ) -> list[str]:
        """Answer the first hidden prompt with the password, and nothing else."""
        if not prompts:
            return []
        is_password = len(prompts) == 1 and not prompts[0][1] and not self._answered
        self._answered = True
        self._unanswered = not is_password
        return [self._password.reveal()] if is_password else [""] * len(prompts)


def _list_methods(transport: paramiko.Transport, user: str) -> list[str]:
    try:
        transport.auth_none(user)
    except paramiko.BadAuthenticationType as error:
        return list(error.allowed_types)
    return []


def _append_key(login: Login, endpoint: Endpoint, public_key: str) -> None:
    key = " ".join(public_key.split()[:2])
    line = portable_line(command("sh", "-c", _AUTHORIZE, "sh", key, public_key).render())
    name = failures.endpoint_text(endpoint)
    try:
        with login.transport.open_session(timeout=COMMAND_TIMEOUT_S) as channel:
            channel.settimeout(COMMAND_TIMEOUT_S)
            channel.set_combine_stderr(True)
            channel.exec_command(line)
            output = b""
            while block := channel.recv(65536):
                output = (output + block)[-2000:]
            code = channel.recv_exit_status()
    except (paramiko.SSHException, OSError, EOFError) as error:
        raise failures.make_link_lost_error(endpoint, str(error)) from error
    if code != 0:
        raise LabError(
            f"the key could not be added to ~/.ssh/authorized_keys of {name}",
            why=output.decode(errors="replace").strip(),
            hint=failures.copy_key_command(endpoint, endpoint.identity),
        )


def _make_second_factor_error(endpoint: Endpoint) -> LabError:
    return LabError(
        f"{failures.endpoint_text(endpoint)} asks for more than a password",
        why="labctl can answer only one question for a password, not a second factor or a change "
        "of the password",
        hint=failures.copy_key_command(endpoint, endpoint.identity),
    )
