"""Client of a keeper on another machine: runs `labctl keep` there over ssh and reads its reply."""

from __future__ import annotations

import json
import socket
import tempfile
from functools import cached_property
from ipaddress import ip_address
from typing import IO, Any

import msgspec

from labctl.commands.ssh import check_host, check_port, check_user
from labctl.errors import LabError, UsageError
from labctl.errors.replies import parse_error, parse_reply
from labctl.lifecycle.import_lab import ImportedLab, KeeperInfo
from labctl.lifecycle.kept_labs import KeeperCheck, kept_lab_name
from labctl.lifecycle.lab_archive import labctl_version
from labctl.model import Endpoint, Run, Value
from labctl.runs.saved_copies import parse_files, pull_from_keeper
from labctl.servers.context import LabContext
from labctl.shell import command
from labctl.state.ledgers import LedgerLine
from labctl.sync.pull import PulledRun
from labctl.transports import Transport

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


class KeeperReport(Value, frozen=True):
    """What a keeper knows of a lab: ledger, runs, and its last check (None before the first)."""

    lines: tuple[LedgerLine, ...] = ()
    runs: tuple[Run, ...] = ()
    round: KeeperCheck | None = None
    running: bool = False


class KeeperHost:
    """The keeper at `host`: a name of the user's own ssh_config, or user@host[:port]."""

    def __init__(self, context: LabContext, host: str) -> None:
        self.context = context
        self.host = host

    @cached_property
    def endpoint(self) -> Endpoint:
        """The keeper's address, resolved by the user's own ssh_config, with its host key pinned."""
        user, host, port = _parse_host(self.host)
        alias = self.context.connections.resolve_alias(host)
        # Another port is another sshd, which may have another key.
        key = alias.host_key if not port or port == alias.port else ""
        endpoint = msgspec.structs.replace(
            alias, user=user or alias.user, port=port or alias.port, host_key=key
        )
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
        known = msgspec.convert(self._request("--hello", self.name)["known"], KeeperInfo)
        if known.version != labctl_version():
            raise self._make_version_error(known.version)
        return known

    def add(self, parcel: memoryview) -> ImportedLab:
        """Send an exported lab. On an error, the keeper has kept nothing of it."""
        try:
            return msgspec.convert(self._request("--add", stdin=parcel)["taken"], ImportedLab)
        except LabError as error:
            what = f"the keeper at {self.host} cannot keep this lab: {error.what}"
            error.args, error.what = (what,), what
            error.hint = error.hint and f"at {self.host}: {error.hint}"
            raise

    def fetch_report(self) -> KeeperReport:
        """Fetch what the keeper knows of this lab; NotFoundError if it does not keep the lab."""
        return msgspec.convert(self._request("--told", self.name)["told"], KeeperReport)

    def drop(self) -> None:
        """Make the keeper forget the lab; BusyError during a recovery."""
        self._request("--drop", self.name, "--json")

    def pull_copy(self, run_id: str, have: dict[str, str], run: Run | None) -> PulledRun:
        """Pull the run's files that the keeper mirrored and `have` (path -> sha256) lacks."""
        with tempfile.TemporaryFile() as kept:
            code = self._transport.stream(
                PREFIX + command("labctl", "keep", "--give", self.name, run_id).render(),
                stdin=json.dumps(have).encode() + b"\n",
                on_stdout=lambda block: _append(kept, block),
            )
            kept.seek(0)
            head = parse_reply(kept.readline().decode(errors="replace")) or {}
            self._check_reply(code, head, "")
            return pull_from_keeper(self.context, run_id, parse_files(head["files"]), kept, run)

    @cached_property
    def _transport(self) -> Transport:
        return self.context.connections.connect(self.endpoint)

    def _request(self, *words: str, stdin: memoryview | bytes = b"") -> dict[str, Any]:
        out, err = bytearray(), bytearray()
        line = PREFIX + command("labctl", "keep", *words).render()
        code = self._transport.stream(line, stdin=stdin, on_stdout=out.extend, on_stderr=err.extend)
        body = parse_reply(out.decode(errors="replace"))
        return self._check_reply(code, body or {}, err.decode(errors="replace"))

    def _check_reply(self, code: int, body: dict[str, Any], stderr: str) -> dict[str, Any]:
        """Return the reply's body, or raise the error that it reports."""
        if (error := parse_error(body)) is not None:
            raise error
        if code == 0 and body:
            return body
        if code == ABSENT:
            raise LabError(
                f"labctl is not installed on {self.host}",
                why="the keeper is `labctl keep`, running on that machine",
                hint=f"ssh {_format_ssh_destination(self.host)} {_install_command()}",
            )
        if code == UNKNOWN_COMMAND:
            raise self._make_version_error("another version", stderr.strip()[-500:])
        raise LabError(
            f"labctl on {self.host} did not reply as a keeper (exit code {code})",
            why=stderr.strip()[-500:],
            hint=f"ssh {_format_ssh_destination(self.host)} labctl keep --list",
        )

    def _make_version_error(self, keeper_version: str, output: str = "") -> LabError:
        return UsageError(
            f"labctl on {self.host} is {keeper_version}, this one is {labctl_version()}",
            why="\n".join(filter(None, ["both must be the same version", output])),
            hint=f"ssh {_format_ssh_destination(self.host)} {_install_command()}",
        )


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
