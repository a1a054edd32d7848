"""Client of a keeper on another machine: runs `labctl keep` there over ssh and reads its reply."""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from ipaddress import ip_address
from typing import IO, Any

import msgspec

from labctl.commands.ssh import check_host, check_port, check_user
from labctl.errors import ConnectError, LabError, UsageError
from labctl.errors.replies import decode_reply
from labctl.lifecycle.kept_labs import KeeperCheck, kept_lab_name
from labctl.lifecycle.lab_archive import labctl_version
from labctl.model import Endpoint, Run, Value, parse_record
from labctl.runs.saved_copies import pull_from_keeper
from labctl.servers.context import LabContext
from labctl.shell import command
from labctl.state.ledgers import LedgerLine
from labctl.sync.pull import PulledRun
from labctl.transports import Transport
from labctl.wire.codec import MessageError
from labctl.wire.kept_labs import (
    DESCRIBE_KEPT_LAB,
    DROP_KEPT_LAB,
    GREET_LAB_KEEPER,
    IMPORT_LAB,
    NOTE_CANCEL,
    SEND_RUN,
    ImportedLab,
    KeeperInfo,
    KeptLabRequest,
    NoteCancelRequest,
    SendRunRequest,
)
from labctl.wire.verbs import Empty, Reply, Request, Verb

ANSWER_S = 60.0
# exit code of the prefix below if labctl is not installed
ABSENT = 97
# exit code without a reply for a command or an option that labctl there does not have
UNKNOWN_COMMAND = 2
# On few machines does the PATH of ssh commands contain the directory where pipx puts programs.
PREFIX = (
    'PATH="$PATH:$HOME/.local/bin:/usr/local/bin"; export PATH; '
    f"command -v labctl >/dev/null 2>&1 || exit {ABSENT}; exec "
)


class MemberReport(Value, frozen=True):
    """What a keeper knows of one of a lab's other servers: ledger and runs, by its own lab id."""

    lab_id: str
    lines: tuple[LedgerLine, ...] = ()
    runs: tuple[Run, ...] = ()


class KeeperReport(Value, frozen=True):
    """What a keeper knows of a lab: ledger, runs, and its last check (None before the first).

    `members` are the servers beside the first one.
    """

    lines: tuple[LedgerLine, ...] = ()
    runs: tuple[Run, ...] = ()
    round: KeeperCheck | None = None
    running: bool = False
    members: tuple[MemberReport, ...] = ()


class KeeperHost:
    """The keeper at `host`: a name of the user's own ssh_config, or user@host[:port]."""

    def __init__(self, context: LabContext, host: str) -> None:
        self.context = context
        self.host = host

    @cached_property
    def endpoint(self) -> Endpoint:
        """The keeper's address, resolved by the user's own ssh_config, with its host key pinned."""
        user, host, port = _parse_host(self.host)
        alias = self.context.connections.user_config.resolve_alias(host)
        # Another port is another sshd, which may have another key.
        key = alias.host_key if not port or port == alias.port else ""
        endpoint = msgspec.structs.replace(
            alias, user=user or alias.user, port=port or alias.port, host_key=key
        )
        with self._name_command():
            return self.context.connections.settle_host_key(endpoint, self.context.reporter)

    @property
    def is_here(self) -> bool:
        """Whether the keeper runs on this machine."""
        host = self.endpoint.host
        if host in ("localhost", socket.gethostname()):
            return True
        try:
            return ip_address(host).is_loopback
        except ValueError:
            return False

    @property
    def name(self) -> str:
        return kept_lab_name(self.context.config.name, self.context.lab_id)

    def fetch_inventory(self) -> KeeperInfo:
        """Return the keeper's version and files; the error says how to install labctl there."""
        known = self._request(GREET_LAB_KEEPER, KeptLabRequest(self.name)).known
        if known.version != labctl_version():
            raise self._make_version_error(known.version)
        return known

    def add(self, parcel: memoryview) -> ImportedLab:
        """Send an exported lab. On an error, the keeper has kept nothing of it."""
        try:
            return self._request(IMPORT_LAB, Empty(), stdin=parcel, timeout_s=None).taken
        except LabError as error:
            what = f"the keeper at {self.host} cannot keep this lab: {error.what}"
            error.what = what
            error.hint = error.hint and f"on {self.host}:\n{error.hint}"
            raise

    def fetch_report(self) -> KeeperReport:
        """Fetch what the keeper knows of this lab; NotFoundError if it does not keep the lab."""
        record = self._request(DESCRIBE_KEPT_LAB, KeptLabRequest(self.name)).report
        try:
            return parse_record(KeeperReport, record)
        except MessageError as error:
            raise self._make_protocol_error(0, str(error)) from None

    def note_cancel(self, run_id: str) -> None:
        """Tell the keeper that the user cancels the run, so that it does not start it again."""
        self._request(NOTE_CANCEL, NoteCancelRequest(self.name, run_id))

    def drop(self) -> None:
        """Make the keeper forget the lab; BusyError during a recovery."""
        self._request(DROP_KEPT_LAB, KeptLabRequest(self.name))

    def pull_copy(self, run_id: str, have: dict[str, str], run: Run | None) -> PulledRun:
        """Pull the run's files that the keeper mirrored and `have` (path -> sha256) lacks."""
        with tempfile.TemporaryFile() as kept:
            with self._name_command():
                code = self._transport.stream(
                    _build_line(SEND_RUN, SendRunRequest(self.name, run_id)),
                    stdin=json.dumps(have).encode() + b"\n",
                    on_stdout=lambda block: _append(kept, block),
                )
            kept.seek(0)
            reply = self._parse_reply(SEND_RUN, code, kept.readline(), "")
            return pull_from_keeper(self.context, run_id, reply.files, kept, run)

    @cached_property
    def _transport(self) -> Transport:
        return self.context.connections.connect(self.endpoint)

    def _request(
        self,
        verb: Verb[Request, Reply],
        request: Request,
        stdin: memoryview | bytes = b"",
        *,
        timeout_s: float | None = ANSWER_S,
    ) -> Reply:
        out, err = bytearray(), bytearray()
        with self._name_command():
            code = self._transport.stream(
                _build_line(verb, request),
                stdin=stdin,
                on_stdout=out.extend,
                on_stderr=err.extend,
                timeout_s=timeout_s,
            )
        return self._parse_reply(verb, code, bytes(out), err.decode(errors="replace"))

    @contextmanager
    def _name_command(self) -> Iterator[None]:
        """Let errors of the connection name a command for the keeper, not for the lab's server."""
        try:
            yield
        except ConnectError as error:
            login = f"ssh {_format_ssh_destination(self.host)}"
            error.hint = f"{login}   # tries to log in to the keeper's machine"
            raise

    def _parse_reply(self, verb: Verb[Any, Reply], code: int, output: bytes, stderr: str) -> Reply:
        """Return the keeper's reply, or raise the error that it reports."""
        problem = ""
        try:
            reply = decode_reply(verb.reply, output)
            if code == 0:
                return reply
        except MessageError as error:
            problem = str(error)
        if code == ABSENT:
            raise LabError(
                f"labctl is not installed on {self.host}",
                why="the keeper is `labctl keep`, running on that machine",
                hint=f"ssh {_format_ssh_destination(self.host)} {_install_command()}",
            )
        if code == UNKNOWN_COMMAND:
            raise self._make_version_error("another version", stderr.strip()[-500:])
        # An import reports its progress on stderr, which is not why its reply is wrong.
        raise self._make_protocol_error(code, (code and stderr.strip()[-500:]) or problem)

    def _make_protocol_error(self, code: int, why: str) -> LabError:
        return LabError(
            f"labctl on {self.host} did not reply as a keeper (exit code {code})",
            why=why,
            hint=f"ssh {_format_ssh_destination(self.host)} labctl keep --list",
        )

    def _make_version_error(self, keeper_version: str, output: str = "") -> LabError:
        return UsageError(
            f"labctl on {self.host} is {keeper_version}, this one is {labctl_version()}",
            why="\n".join(filter(None, ["both must be the same version", output])),
            hint=f"ssh {_format_ssh_destination(self.host)} {_install_command()}",
        )


def _build_line(verb: Verb[Request, Any], request: Request) -> str:
    words = ["labctl", "keep", f"--{verb.name}", *request]
    # Without it, --drop replies with a text for people.
    return PREFIX + command(*words, "--json").render()


def _append(file: IO[bytes], block: bytes) -> None:
    file.write(block)


def _parse_host(host: str) -> tuple[str, str, int]:
    """Parse `[user@]host[:port]` into (user or "", host, port or 0)."""
    user, _, address = host.rpartition("@")
    name, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or ":" in name:
        name, port = address, ""
    return (
        check_user(user) if user else "",
        check_host(name.strip("[]")),
        check_port(int(port)) if port else 0,
    )


def _format_ssh_destination(host: str) -> str:
    user, name, port = _parse_host(host)
    destination = f"{user}@{name}" if user else name
    return f"-p {port} {destination}" if port else destination


def _install_command() -> str:
    return f"\"pipx install --force 'labctl=={labctl_version()}'\""
