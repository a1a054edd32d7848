"""What every flow stands on: one lab's configuration, state, provider and connections."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from labctl.config import LabConfig, Paths, student_key
from labctl.errors import ConnectError, NotFoundError
from labctl.events import Note, Progress, Reporter
from labctl.model import Endpoint, Facts, Server
from labctl.providers import Provider, Surroundings, provider_class
from labctl.state import State
from labctl.state.disks import list_kept_disks

if TYPE_CHECKING:
    from labctl.servers.agent import Remote
    from labctl.servers.connections import Connections


@dataclass(frozen=True)
class Ground:
    """Made once per command. Nothing here touches the network before it is used.

    `everywhere` has the provider look at every region that the account has. Labs of one `group`
    share a key pair and what else the provider can share. `owner` is whom the
    provider is told, the user's name if ""; `place` tells apart the machines that they work from.
    `saver_s` is how long before a limit the server's runs are to stop, since somebody brings home
    what it cannot save by itself; 0 where nobody does. Without `has_results` nobody wants what is
    on its server, such as one for grading.
    """

    config: LabConfig
    lab_id: str
    paths: Paths
    state: State
    reporter: Reporter
    everywhere: bool = False
    group: str = ""
    owner: str = ""
    place: str = ""
    saver_s: float = 0.0
    has_results: bool = True

    def beside(
        self,
        config: LabConfig,
        lab_id: str,
        reporter: Reporter | None = None,
        *,
        has_results: bool = True,
    ) -> Ground:
        """The ground of another lab that shares this one's provider, state and connections."""
        made = dataclasses.replace(
            self,
            config=config,
            lab_id=lab_id,
            reporter=reporter or self.reporter,
            has_results=has_results and self.has_results,
        )
        # What a cached_property holds lies in the instance's dictionary.
        made.__dict__.update(provider=self.provider, connections=self.connections)
        return made

    def in_group(self, group: str) -> Ground:
        return dataclasses.replace(self, group=group)

    @functools.cached_property
    def connections(self) -> Connections:
        from labctl.servers.connections import Connections

        return Connections(self.paths.ssh_dir, self.paths.user_ssh_config)

    @functools.cached_property
    def provider(self) -> Provider:
        name = self.config.server.provider
        made = provider_class(name)
        settings = self.config.server.provider_settings.get(name)
        return made(made.settings_type() if settings is None else settings, self._surroundings())

    def _surroundings(self) -> Surroundings:
        import getpass

        return Surroundings(
            data_dir=self.paths.data_dir,
            owner=self.owner or getpass.getuser(),
            place=self.place,
            connect=self.connections.connect,
            settle_host_key=self._settle,
            resolve_alias=self.connections.resolve_alias,
            progress=self._progress,
            base_image=self.config.base_image,
            wheelhouse=self.config.wheelhouse,
            package_index=self.config.package_index,
            cache_dir=self.paths.cache_dir,
            everywhere=self.everywhere,
            regions=self._regions_on_record(),
            talk=self.connections.talk,
            student_key=str(student_key(self.paths)),
        )

    def _regions_on_record(self) -> tuple[str, ...]:
        """Where the lab has, or an interrupted `up` may have made, what lab.yaml names no more."""
        name = self.config.server.provider
        # Of every lab: a course's labs share one provider, and an open attempt is rare.
        found = [one.offer.region for one in self.state.open_attempts() if one.provider == name]
        found += [s.offer.region for s in self.state.servers(self.lab_id) if s.provider == name]
        kept = [one.disk for one in list_kept_disks(self.state, self.lab_id)]
        found += [disk.region for disk in kept if disk.provider == name]
        return tuple(sorted(set(found) - {""}))

    def _settle(self, endpoint: Endpoint) -> Endpoint:
        return self.connections.settle_host_key(endpoint, self.reporter)

    def _progress(self, text: str, done: float, total: float) -> None:
        self.reporter.emit(Progress(name=text, done=done, total=total, unit="steps"))

    def server(self) -> Server:
        """The lab's server as recorded; NotFoundError where there is none."""
        known = self.state.server_of_lab(self.lab_id)
        if known is None:
            ended = self.state.events(lab_id=self.lab_id, kind="ready", limit=1)
            why = "the last one has ended" if ended else "none was started"
            raise NotFoundError(f"{self.config.name} has no server", why=why, hint="labctl up")
        if known.state == "stopped":
            raise NotFoundError(
                f"the server of {self.config.name} is stopped",
                why="its disk is kept",
                hint="labctl up",
            )
        return known

    def as_ours(self, found: Server, known: Server | None) -> Server:
        """A server of the provider's, with our key and under an alias that nothing else bears."""
        alias = known.alias if known else self.config.name
        if not self.connections.alias_free(alias, found.id):
            alias = f"{self.config.name}-{self.lab_id[:4]}"
            if known is None or known.alias != alias:
                text = f"ssh already knows a host {self.config.name}; this one is called {alias}"
                self.reporter.emit(Note(text=text))
        identity = found.endpoint.identity or str(self.identity)
        endpoint = msgspec.structs.replace(found.endpoint, identity=identity)
        return msgspec.structs.replace(found, alias=alias, endpoint=endpoint)

    @property
    def identity(self) -> Path:
        """The private key that labctl logs in with, where the provider says nothing else."""
        return self.paths.keys_dir / (self.group or self.lab_id) / "id_ed25519"

    def remote(self, server: Server) -> Remote:
        """The program on the server, over labctl's shared connection.

        ConnectError where the server has been removed meanwhile, perhaps by another process: its
        ssh_config must not come back.
        """
        from labctl.servers.agent import Remote

        if self.state.server(server.id) is None:
            raise ConnectError(
                f"the server {server.id} has been removed", hint="labctl status --refresh"
            )
        return Remote(self.connections.open(server))

    def keep_facts(self, server: Server, facts: Facts) -> None:
        path = self.paths.ssh_dir / server.id / "facts.json"
        path.write_bytes(msgspec.json.encode(facts))

    def facts(self, server: Server) -> Facts:
        """What the last `up` found on the server; empty Facts where nothing is known."""
        path = self.paths.ssh_dir / server.id / "facts.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=Facts)
        except (FileNotFoundError, msgspec.MsgspecError):
            return Facts()
