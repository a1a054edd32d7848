"""One provider under the contract, in surroundings where it really works."""

from __future__ import annotations

import secrets
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labctl.model import CreateServerRequest, Need, Resource, Server
from labctl.providers import Provider
from labctl.servers.host_keys import ensure_key_pair

DEADLINE_S = 300.0


def wait_for(condition: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
    """The first true value of `condition`; providers never wait, so tests do."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {deadline_s} s"
        time.sleep(0.1)
    return value


@dataclass
class Case:
    """What the contract's tests need of a provider.

    `leave_something` makes a leftover as a normal life of a server does, and returns it; None for
    a provider that never leaves any. It must give at least two servers at once; where
    `shares_machine`, they are one machine for two labs.
    """

    provider: Provider
    directory: Path
    leave_something: Callable[[], Resource] | None = None
    need: Need = field(default_factory=Need)
    lab_ids: list[str] = field(default_factory=list)
    shares_machine: bool = False

    def request(self, lab: str = "contract") -> CreateServerRequest:
        """A new attempt of a new lab."""
        identity = self.directory / "id_ed25519"
        self.lab_ids.append(secrets.token_hex(6))
        return CreateServerRequest(
            lab=lab,
            lab_id=self.lab_ids[-1],
            token=secrets.token_hex(8),
            public_key=ensure_key_pair(identity),
            identity=str(identity),
            need=self.need,
            tags={"labctl.test": "1"},
        )

    def create(self, request: CreateServerRequest | None = None) -> Server:
        request = request or self.request()
        return self.provider.create(self.provider.offers(request.need)[0], request)

    def running(self, server: Server) -> Server:
        """The server once it runs and can be reached by address and key."""

        def now() -> Server | None:
            found = self.provider.find(server.id)
            ready = found and found.state == "running" and found.endpoint.host_key
            return found if ready else None

        found: Server = wait_for(now)
        return found

    def log_in(self, server: Server) -> None:
        """Run `true` there as a user's ssh would, with the pinned key and no other."""
        endpoint = server.endpoint
        known = self.directory / f"{server.id}.known_hosts"
        known.write_text(f"{server.id} {endpoint.host_key}\n")
        words = [
            *("ssh", "-F", "none", "-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes"),
            *("-o", f"UserKnownHostsFile={known}", "-o", f"HostKeyAlias={server.id}"),
            *("-o", "StrictHostKeyChecking=yes", "-i", endpoint.identity),
            *("-p", str(endpoint.port), "--", f"{endpoint.user}@{endpoint.host}", "true"),
        ]
        wait_for(lambda: subprocess.run(words, capture_output=True, check=False).returncode == 0)

    def gone(self, server_id: str) -> None:
        """Wait until the provider confirms the end."""

        def ended() -> bool:
            found = self.provider.find(server_id)
            return found is None or found.state == "terminated"

        wait_for(ended)

    def ours(self) -> list[Server]:
        """The servers of this test alone; others may use the provider at the same time."""
        return [server for server in self.provider.servers() if server.lab_id in self.lab_ids]

    def clean_up(self) -> None:
        for server in self.ours():
            self.provider.terminate(server.id)
            self.gone(server.id)
