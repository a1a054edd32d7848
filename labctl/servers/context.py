"""The context of a flow: one lab's configuration, state, provider and connections."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from labctl.config import LabConfig, Paths, find_user_name, student_key
from labctl.config.member_ids import list_lab_ids
from labctl.decoding import decode_json
from labctl.errors import ConnectError, NotFoundError, PolicyError
from labctl.errors.subject import LAB, Subject
from labctl.events import Note, Progress, Reporter, report_wait
from labctl.lazy import lazy_imports
from labctl.model import Endpoint, Moving, Server, ServerFacts
from labctl.providers import (
    LogsInAsUser,
    OnThisMachine,
    Provider,
    ProviderContext,
    get_provider_class,
)
from labctl.state import State
from labctl.state.disks import list_kept_disks

if TYPE_CHECKING:
    from labctl.servers.connections import Connections

with lazy_imports(__name__):
    from labctl.servers import agent, connections


class LabContext(msgspec.Struct, frozen=True, dict=True):
    """One lab's configuration, state, provider and connections, created once per command.

    Nothing here touches the network before it is used.

    `everywhere` makes the provider search every region of the account. Labs of one `group` share a
    key pair and whatever else the provider can share; these bear `group_name`, or `group` if that
    is "". `owner` is the owner that is recorded at the provider, the user's name if ""; `place`
    tells apart the machines that the owner works from.
    `saver_s` is how long before a limit the server's runs must stop, so that a keeper can fetch
    what the server cannot save by itself; 0 without a keeper. `has_results` is False for a server
    whose files are not needed, such as a server for grading. `in_process` keeps connections to
    servers inside this process. `is_keeper` says that this is the keeper that a lab was handed over
    to. `rank` is that of the server that this context is about, if the lab has several; None for
    all of them. `subject` knows the commands that the user types.
    `moving` says which part its server has in a move of the lab; see `Server.moving`.
    `shared_provider` and `shared_connections` are those of another context, used by this one too.
    """

    config: LabConfig
    lab_id: str
    paths: Paths
    state: State
    reporter: Reporter
    everywhere: bool = False
    group: str = ""
    group_name: str = ""
    owner: str = ""
    place: str = ""
    saver_s: float = 0.0
    has_results: bool = True
    in_process: bool = False
    is_keeper: bool = False
    rank: int | None = None
    moving: Moving = ""
    subject: Subject = LAB
    shared_provider: Provider | None = None
    shared_connections: Connections | None = None

    def replace_provider(self, provider: Provider) -> LabContext:
        """Return this context with another provider and the same connections."""
        return msgspec.structs.replace(
            self, shared_provider=provider, shared_connections=self.connections
        )

    def replace_reporter(self, reporter: Reporter) -> LabContext:
        """Return this context with another reporter and the same provider and connections."""
        return msgspec.structs.replace(
            self,
            reporter=reporter,
            shared_provider=self.provider,
            shared_connections=self.connections,
        )

    def make_sibling(
        self,
        config: LabConfig,
        lab_id: str,
        reporter: Reporter | None = None,
        *,
        has_results: bool = True,
        subject: Subject | None = None,
    ) -> LabContext:
        """Return the context of another lab that shares this provider, state and connections."""
        return msgspec.structs.replace(
            self,
            config=config,
            lab_id=lab_id,
            reporter=reporter or self.reporter,
            has_results=has_results and self.has_results,
            subject=subject or self.subject,
            shared_provider=self.provider,
            shared_connections=self.connections,
        )

    @property
    def name(self) -> str:
        """What messages call the lab: a seat by its own name, since its lab has a pseudonym."""
        return self.name_for(self.subject)

    def name_for(self, subject: Subject) -> str:
        """What an error for `subject` calls the lab."""
        return subject.seat or self.config.name

    @functools.cached_property
    def connections(self) -> Connections:
        if self.shared_connections is not None:
            return self.shared_connections
        return connections.Connections(
            self.paths.ssh_dir,
            self.paths.user_ssh_config,
            in_process=self.in_process,
            report_login=lambda host: report_wait(self.reporter, f"connecting to {host}"),
        )

    @functools.cached_property
    def provider(self) -> Provider:
        if self.shared_provider is not None:
            return self.shared_provider
        return self.make_provider(self.config.server.provider)

    def make_provider(self, name: str, *, asks: bool = True) -> Provider:
        """Create the provider `name` with the lab's settings for it, or else its defaults.

        Without `asks`, it is an error if the provider would have a question for the user.
        """
        kind = get_provider_class(name)
        settings = self.config.server.provider_settings.get(name)
        if settings is None:
            settings = kind.settings_type()
        context = self._build_provider_context(name)
        if not asks:
            context = msgspec.structs.replace(context, settle_host_key=_require_host_key)
        return kind(settings, context)

    @functools.cached_property
    def by_provider(self) -> dict[str, LabContext]:
        """The contexts of the same lab with other providers, as far as they were needed."""
        return {}

    @property
    def owner_name(self) -> str:
        """The owner that the provider records for the servers created here."""
        return self.owner or find_user_name()

    @property
    def is_on_this_machine(self) -> bool:
        """Whether the lab's servers are on this machine, so that nobody else controls them."""
        return isinstance(self.provider, OnThisMachine)

    @property
    def logs_in_as_user(self) -> bool:
        """Whether labctl uses the keys of the user's ssh where the provider names no key."""
        return isinstance(self.provider, LogsInAsUser)

    def _build_provider_context(self, name: str) -> ProviderContext:
        return ProviderContext(
            data_dir=self.paths.data_dir,
            owner=self.owner_name,
            place=self.place,
            connect=self.connections.connect,
            settle_host_key=self._settle_host_key,
            resolve_alias=self.connections.user_config.resolve_alias,
            progress=self._report_progress,
            base_image=self.config.base_image,
            wheelhouse=self.config.wheelhouse,
            package_index=self.config.package_index,
            cache_dir=self.paths.cache_dir,
            everywhere=self.everywhere,
            regions=self._list_recorded_regions(name),
            talk=self.connections.open_line_channel,
            student_key=str(student_key(self.paths)),
            subject=self.subject,
            note=lambda text: self.reporter.emit(Note(text=text)),
            open_provider=functools.partial(self.make_provider, asks=False),
        )

    def _list_recorded_regions(self, name: str) -> tuple[str, ...]:
        """List a provider's regions that may hold resources of the lab, whatever lab.yaml says.

        They hold a server, a kept disk, or what an interrupted `up` may have created.
        """
        # Attempts of all labs: a course's labs share one provider, and an open attempt is rare.
        regions = [a.offer.region for a in self.state.list_open_attempts() if a.provider == name]
        regions += [
            server.offer.region
            for lab_id in list_lab_ids(self.lab_id)
            for server in self.state.list_servers(lab_id)
            if server.provider == name
        ]
        disks = [kept.disk for kept in list_kept_disks(self.state, self.lab_id)]
        regions += [disk.region for disk in disks if disk.provider == name]
        return tuple(sorted(set(regions) - {""}))

    def _settle_host_key(self, endpoint: Endpoint) -> Endpoint:
        return self.connections.settle_host_key(endpoint, self.reporter)

    def _report_progress(self, text: str, done: float, total: float) -> None:
        self.reporter.emit(Progress(name=text, done=done, total=total, unit="steps"))

    def get_server(self) -> Server:
        """Return the lab's server as recorded; NotFoundError without one that runs or starts."""
        server = self.state.get_lab_server(self.lab_id)
        if server is None:
            ended = self.state.list_events(lab_id=self.lab_id, kind="ready", limit=1)
            why = "the last one has ended" if ended else "none was started"
            raise NotFoundError(f"{self.name} has no server", why=why, hint=self.subject.up)
        if server.state == "stopped":
            raise NotFoundError(
                f"the server of {self.name} is stopped",
                why="its disk is kept, with everything on it",
                hint="labctl start" if self.subject.kind == "lab" else self.subject.up,
            )
        if server.state == "ending":
            raise NotFoundError(
                f"the server of {self.name} is being removed",
                why="labctl was interrupted before it knew that nothing is left",
                hint=self.subject.down,
            )
        return server

    def assign_alias(self, server: Server, recorded: Server | None) -> Server:
        """Add a unique alias, and our login key if it is used, to a server of the provider.

        `recorded` is the same server as this machine has it on record, None for a new one.
        """
        name = f"{self.config.name}-next" if self.moving == "next" else self.config.name
        alias = recorded.alias if recorded else name
        if not self.connections.is_alias_free(alias, server.id):
            alias = f"{name}-{self.lab_id[:4]}"
            if recorded is None or recorded.alias != alias:
                text = f"ssh already knows a host {name}; this one is called {alias}"
                self.reporter.emit(Note(text=text))
        identity = server.endpoint.identity or ("" if self.logs_in_as_user else str(self.identity))
        endpoint = msgspec.structs.replace(server.endpoint, identity=identity)
        return msgspec.structs.replace(server, alias=alias, endpoint=endpoint, moving=self.moving)

    @property
    def identity(self) -> Path:
        """The private key that labctl logs in with, unless the provider names another one."""
        return self.paths.keys_dir / (self.group or self.lab_id) / "id_ed25519"

    def open_agent(self, server: Server) -> agent.AgentClient:
        """Return a client of the agent on the server, over labctl's shared connection.

        ConnectError if the server has been removed meanwhile, perhaps by another process: its
        ssh_config must not be written again.
        """
        if self.state.get_server(server.id) is None:
            raise ConnectError(
                f"the server {server.id} has been removed", hint=self.subject.refresh
            )
        return agent.AgentClient(self.connections.open(server))

    def save_facts(self, server: Server, facts: ServerFacts) -> None:
        """Store the ServerFacts of a server for `load_facts`."""
        path = self.paths.ssh_dir / server.id / "facts.json"
        path.write_bytes(msgspec.json.encode(facts))

    def load_facts(self, server: Server) -> ServerFacts:
        """Return what the last `up` found on the server; empty ServerFacts if nothing is stored."""
        path = self.paths.ssh_dir / server.id / "facts.json"
        try:
            return decode_json(path.read_bytes(), ServerFacts)
        except (FileNotFoundError, msgspec.MsgspecError):
            return ServerFacts()


def _require_host_key(endpoint: Endpoint) -> Endpoint:
    """Return the endpoint if its host key is pinned; PolicyError if the user must confirm it."""
    if not endpoint.host_key:
        raise PolicyError(
            f"the host key of {endpoint.host} was not confirmed yet",
            hint="labctl doctor   # with its provider in lab.yaml, shows the fingerprint once",
        )
    return endpoint
