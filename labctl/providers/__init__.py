"""Where servers come from: the contract, and the registry by entry point.

A provider is one module with one entry point in the group `labctl.providers`; its class is made
with its settings (a msgspec Struct, from lab.yaml's `server.<name>`) and a `Surroundings`.
Providers never wait, retry or clean up after a half-made server: `servers/attempts.py`,
`reachability.py` and `removal.py` do.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from labctl.errors import UsageError
from labctl.model import (
    Boot,
    Check,
    CreateRequest,
    Endpoint,
    Need,
    Offer,
    ProviderAccount,
    Resource,
    Server,
    Value,
)


class Surroundings(Value, frozen=True):
    """What a provider may know of the machine and the user. Paths are absolute.

    `connect` makes a connection where a provider needs SSH (claiming a static machine): it takes
    an Endpoint and returns a Transport. `settle_host_key` takes an Endpoint without a pinned key,
    has the user confirm its fingerprint once, and returns the Endpoint with the key.
    `resolve_alias` takes a host's name and returns what the user's own ssh_config says of it;
    None where that is not to be read.
    `base_image`, `wheelhouse`, `package_index` are the switches for every image build.
    `place` tells this machine apart from others that the owner works from; "" for the only one.
    `talk` begins a talk in lines with a forced command: it takes an Endpoint and the request, and
    returns what `ask`s and `close`s. `student_key` is the private key that courses know.
    `cache_dir` may be deleted at any time. `everywhere` asks for every region, not only the
    configured ones; `regions` are asked besides those, since something on record may be there.
    """

    data_dir: Path
    owner: str
    connect: Callable[[Endpoint], Any]
    settle_host_key: Callable[[Endpoint], Endpoint]
    progress: Callable[[str, float, float], None]
    base_image: str = ""
    wheelhouse: str = ""
    package_index: str = ""
    resolve_alias: Callable[[str], Endpoint] | None = None
    cache_dir: Path | None = None
    place: str = ""
    everywhere: bool = False
    regions: tuple[str, ...] = ()
    talk: Callable[[Endpoint, str], Any] | None = None
    student_key: str = ""


class Provider(Protocol):
    """The whole contract. Every method may raise ProviderError and its subclasses.

    `settle_s` is how long the provider may hide a server that it has just made.
    """

    name: ClassVar[str]
    settings_type: ClassVar[type[Value]]
    settle_s: float

    def __init__(self, settings: Any, surroundings: Surroundings) -> None: ...

    def get_account(self) -> ProviderAccount:
        """The account of the credentials in use; ProviderAccount() where there are no accounts.

        Every server that `create`, `find` and `servers` return bears its id. labctl refuses to act
        on a server of another account, and takes an absent one for gone only in its own.
        """

    def check(self, need: Need | None = None) -> list[Check]:
        """Credentials, quota for the need, engine: one Check each, with the way to mend it."""

    def offers(self, need: Need) -> list[Offer]:
        """What there is for this need, the best first; perhaps nothing.

        NoOfferError, instead of nothing, tells which condition ruled out what.
        """

    def create(self, offer: Offer, request: CreateRequest) -> Server:
        """Make a server and return at once; the same token gives the same server.

        CapacityError: the next offer may do. QuotaError, DeniedError, CredentialsError: none will.
        ThrottledError and BusyError: the same request again, later. Any other error leaves it open
        whether the server was made; the same request tells.
        """

    def find(self, server_id: str) -> Server | None:
        """The server as it is now, or None when the provider knows none (yet, or any more)."""

    def servers(self) -> list[Server]:
        """Every server that bears our tag."""

    def terminate(self, server_id: str) -> None:
        """End it. An absent server counts as success."""

    def leftovers(self) -> list[Resource]:
        """Every other tagged resource, with its price."""

    def remove(self, resource: Resource) -> None:
        """Remove one of them. An absent one counts as success."""


@runtime_checkable
class Stoppable(Protocol):
    """Compute can end while the disk stays."""

    def stop(self, server_id: str) -> None: ...

    def start(self, server_id: str) -> None: ...


@runtime_checkable
class Lease(Protocol):
    """What the provider gave is held for a time, which work on it renews."""

    def extend(self, server_id: str, span_s: int) -> Server | None:
        """Let it end `span_s` seconds from now; None where it has ended already."""


@runtime_checkable
class Deadline(Protocol):
    """A timer at the provider ends the server, even if the machine hangs."""

    @property
    def deadline_lacks(self) -> str:
        """What is to be set up before one can be set, in words; "" where nothing is."""

    def set_deadline(self, server_id: str, at: float) -> None:
        """Let it end at `at` (Unix seconds), in place of any earlier setting.

        DeniedError where the account does not permit it: the server then ends only itself.
        """


@runtime_checkable
class EndsBilling(Protocol):
    """Some of a server's guards end what it costs, and not only the machine.

    `ends_billing` names those that do: "shutdown" where a machine that powers itself off costs
    nothing more, "timer" where one that its Deadline ends does not.
    """

    ends_billing: ClassVar[frozenset[str]]


@runtime_checkable
class Guarded(Protocol):
    """Whoever made its servers has armed their watchdogs, and alone moves their limits."""

    def guarded_as(self, server_id: str) -> str:
        """The id of the lab that the server's watchdog was armed for."""

    def prolong(self, server_id: str, span_s: int) -> None:
        """Let the server live `span_s` seconds longer; PolicyError beyond what is allowed."""


@runtime_checkable
class FirstBoot(Protocol):
    """The machine sets itself up from a script that goes with `create`, host key included."""

    def first_boot(self, boot: Boot) -> str:
        """The script, for CreateRequest.first_boot. UsageError where it would be too large."""

    def pin(self, server_id: str, host_key: str, next_host_key: str = "") -> None:
        """Write the host keys to believe into the server's tags."""


@runtime_checkable
class Gate(Protocol):
    """The provider lets in only known addresses."""

    def admit(self, server_id: str) -> str:
        """Let the caller's present address in; returns it where that was news, else ""."""


@runtime_checkable
class Keep(Protocol):
    """A server's disk can outlive it."""

    @property
    def keeps_itself(self) -> bool:
        """Whether its servers may keep their disks by themselves when they end."""

    def keep_disk(self, server_id: str, expires_at: float) -> list[Resource]:
        """Have its own disks outlive it, whatever ends it, tagged with the expiry (Unix seconds).

        Returns them with their prices. While the server lives, `leftovers` shows them as parts of
        it, without an expiry. Repeated, it moves the expiry.
        """

    def release_disk(self, server_id: str) -> None:
        """Have its own disks end with it again. An absent server counts as success."""

    def attach_kept(self, resource: Resource, server_id: str) -> str:
        """Give a kept disk to a server; returns the device's name there."""


@runtime_checkable
class Explains(Protocol):
    """It can say why a server that is gone has ended."""

    def why_ended(self, server_id: str) -> str:
        """In words for people; "" where that is not known."""


@runtime_checkable
class Reclaim(Protocol):
    """A server can be taken back on purpose, as its provider would by itself: for drills.

    `no_notice` says, for people, why its own notice cannot be had for the asking; "" where that
    needs no reason.
    """

    no_notice: ClassVar[str]

    def reclaim(self, server_id: str, notice_s: float) -> bool:
        """Give notice now and take the server `notice_s` later; returns at once.

        False where the provider gives no notice for the asking: then nothing was done. With 0 the
        server goes at once and unprepared, its disk with it. An error where there is none.
        """


class Room(Value, frozen=True):
    """How many machines of an offer's kind an account may have at once; None: nobody tells.

    `quota` names what limits them, of which there are `limit` `units`, and one machine takes
    `each`. `code` is the provider's own for it, `next` the page or deed that raises it.
    """

    most: int | None = None
    quota: str = ""
    code: str = ""
    units: str = ""
    limit: float | None = None
    each: float = 1.0
    next: str = ""


@runtime_checkable
class Quotas(Protocol):
    """The account's quotas can be asked: for a class, weeks ahead."""

    def room(self, offer: Offer) -> Room:
        """How many of these fit into the account's quota, those that run now included."""


@runtime_checkable
class Bake(Protocol):
    """A machine image can be made of a server, from which others boot."""

    def bake(self, server_id: str, name: str, tags: dict[str, str]) -> str:
        """Begin to make one, and return its id at once. The server may be restarted for it."""

    def baked(self, image_id: str) -> str:
        """How it is: "pending", "ready", or in words why it cannot be used."""

    @classmethod
    def booting(cls, settings: Any, image_id: str) -> Any:
        """Settings with the image in place of what servers boot from otherwise."""


@runtime_checkable
class Console(Protocol):
    """What the machine printed while it booted, for when SSH never opens."""

    def console(self, server_id: str) -> str: ...


# Entry points of labctl's own, known here as well: asking what is installed costs 15 ms.
BUILT_IN = {
    "aws": "labctl.providers.aws:AwsProvider",
    "course": "labctl.providers.course:CourseProvider",
    "local": "labctl.providers.local:LocalProvider",
    "static": "labctl.providers.static:StaticProvider",
}


def provider_names() -> list[str]:
    from importlib.metadata import entry_points

    return sorted(entry.name for entry in entry_points(group="labctl.providers"))


def provider_class(name: str) -> type[Provider]:
    """The class registered under `name`; UsageError names what there is."""
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        built_in: type[Provider] = getattr(import_module(module), attribute)
        return built_in
    from importlib.metadata import entry_points

    for entry in entry_points(group="labctl.providers", name=name):
        loaded: type[Provider] = entry.load()
        return loaded
    raise UsageError(
        f"there is no provider called {name!r}",
        why=f"installed: {', '.join(provider_names())}",
        hint="labctl config",
    )
