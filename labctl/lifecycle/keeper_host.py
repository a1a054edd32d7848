"""The keeper on another machine, from the laptop: asked by ssh, `labctl keep` there answers."""

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
from labctl.errors.replies import raised, reply_in
from labctl.lifecycle.import_lab import Known, Taken
from labctl.lifecycle.kept_labs import Round, ward_name
from labctl.lifecycle.lab_archive import version
from labctl.model import Endpoint, Run, Value
from labctl.runs.saved_copies import from_copy
from labctl.servers.context import Ground
from labctl.shell import command
from labctl.state.ledgers import Line
from labctl.sync.pull import PulledRun
from labctl.transports import Transport

ANSWER_S = 60.0
ABSENT = 97
# Where pipx puts programs is on few machines' PATH for commands that come by ssh.
WAY = (
    'PATH="$PATH:$HOME/.local/bin:/usr/local/bin"; export PATH; '
    f"command -v labctl >/dev/null 2>&1 || exit {ABSENT}; exec "
)


class Told(Value, frozen=True):
    """What a keeper knows of a lab: its ledger, its runs, its last round (None: none yet)."""

    lines: tuple[Line, ...] = ()
    runs: tuple[Run, ...] = ()
    round: Round | None = None
    running: bool = False


class KeeperHost:
    """The keeper at `host`: a name of the user's own ssh_config, or user@host[:port]."""

    def __init__(self, ground: Ground, host: str) -> None:
        self.ground = ground
        self.host = host

    @cached_property
    def endpoint(self) -> Endpoint:
        """The way there, its host key pinned, as the user's own ssh_config would have it."""
        user, host, port = _parsed(self.host)
        found = self.ground.connections.resolve_alias(host)
        # Another port is another sshd, whose key may be another.
        key = found.host_key if not port or port == found.port else ""
        given = msgspec.structs.replace(
            found, user=user or found.user, port=port or found.port, host_key=key
        )
        return self.ground.connections.settle_host_key(given, self.ground.reporter)

    @property
    def is_here(self) -> bool:
        """Whether that is this very machine."""
        host = self.endpoint.host
        if host in ("localhost", socket.gethostname()):
            return True
        try:
            return ip_address(host).is_loopback
        except ValueError:
            return False

    @property
    def name(self) -> str:
        return ward_name(self.ground.config.name, self.ground.lab_id)

    def hello(self) -> Known:
        """What is there; an error that says how to install labctl there where it is not."""
        known = msgspec.convert(self._ask("--hello", self.name)["known"], Known)
        if known.version != version():
            raise self._other_version(known.version)
        return known

    def add(self, parcel: memoryview) -> Taken:
        """Hand a parcel over. What the keeper lacks is an error here, and nothing is kept then."""
        try:
            return msgspec.convert(self._ask("--add", stdin=parcel)["taken"], Taken)
        except LabError as error:
            what = f"the keeper at {self.host} cannot keep this lab: {error.what}"
            error.args, error.what = (what,), what
            error.hint = error.hint and f"at {self.host}: {error.hint}"
            raise

    def told(self) -> Told:
        """NotFoundError where it does not keep this lab (any more)."""
        return msgspec.convert(self._ask("--told", self.name)["told"], Told)

    def drop(self) -> None:
        """It keeps the lab no longer; BusyError in the middle of a recovery."""
        self._ask("--drop", self.name, "--json")

    def copy_of(self, run_id: str, have: dict[str, str], run: Run | None) -> PulledRun:
        """What it has mirrored of a run, but for what is here already (`have`: path -> sha256)."""
        with tempfile.TemporaryFile() as kept:
            code = self._transport.stream(
                WAY + command("labctl", "keep", "--give", self.name, run_id).render(),
                stdin=json.dumps(have).encode() + b"\n",
                on_stdout=lambda block: _into(kept, block),
            )
            kept.seek(0)
            head = reply_in(kept.readline().decode(errors="replace")) or {}
            self._checked(code, head, "")
            return from_copy(self.ground, run_id, head["files"], kept, run)

    @cached_property
    def _transport(self) -> Transport:
        return self.ground.connections.connect(self.endpoint)

    def _ask(self, *words: str, stdin: memoryview | bytes = b"") -> dict[str, Any]:
        out, err = bytearray(), bytearray()
        line = WAY + command("labctl", "keep", *words).render()
        code = self._transport.stream(line, stdin=stdin, on_stdout=out.extend, on_stderr=err.extend)
        body = reply_in(out.decode(errors="replace"))
        return self._checked(code, body or {}, err.decode(errors="replace"))

    def _checked(self, code: int, body: dict[str, Any], said: str) -> dict[str, Any]:
        if (error := raised(body)) is not None:
            raise error
        if code == 0 and body:
            return body
        if code == ABSENT:
            raise LabError(
                f"there is no labctl at {self.host}",
                why="its keeper is the `labctl keep` of that machine",
                hint=f"ssh {_shown(self.host)} {_install_command()}",
            )
        if "no command 'keep'" in said.lower() or "no such option" in said.lower():
            raise self._other_version("an older one")
        raise LabError(
            f"labctl at {self.host} does not answer as a keeper does (exit {code})",
            why=said.strip()[-500:],
            hint=f"ssh {_shown(self.host)} labctl keep --list",
        )

    def _other_version(self, there: str) -> LabError:
        return UsageError(
            f"labctl at {self.host} is {there}, here it is {version()}",
            why="a keeper must be of the same version",
            hint=f"ssh {_shown(self.host)} {_install_command()}",
        )


def _into(file: IO[bytes], block: bytes) -> None:
    file.write(block)


def _parsed(host: str) -> tuple[str, str, int]:
    """(user or "", host, port or 0) of `[user@]host[:port]`."""
    user, _, place = host.rpartition("@")
    name, colon, port = place.rpartition(":")
    if not colon or not port.isdigit() or ":" in name:
        name, port = place, ""
    return (
        check_user(user) if user else "",
        check_host(name.strip("[]")),
        check_port(int(port)) if port else 0,
    )


def _shown(host: str) -> str:
    user, name, port = _parsed(host)
    whom = f"{user}@{name}" if user else name
    return f"-p {port} {whom}" if port else whom


def _install_command() -> str:
    return f"\"pipx install --force 'labctl=={version()}'\""
