"""Providers, where servers come from: their protocol, and the registry by entry point.

A provider is one module with one entry point in the group `labctl.providers`; its class is created
with its settings (a msgspec Struct, from lab.yaml's `server.<name>`) and a `ProviderContext`.
Providers never wait, retry or clean up after a failed creation: `servers/attempts.py`,
`reachability.py` and `end_server.py` do.

May import: commands, config, estimate and the layers below.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from labctl.errors import UnknownNameError
from labctl.errors.subject import LAB, Subject
from labctl.lazy import import_alone, lazy_imports
from labctl.model import (
    Boot,
    Check,
    CreateServerRequest,
    Endpoint,
    Need,
    Offer,
    ProviderAccount,
    Resource,
    Server,
    Value,
)

if TYPE_CHECKING:
    from labctl.wire.runs import JobRequest
    from labctl.wire.watchdog import WatchRecord

with lazy_imports(__name__):
    from importlib import metadata

    from labctl.config import reader


class ProviderContext(Value, frozen=True):
    """What a provider may know about this machine and its user. Paths are absolute.

    `connect` opens a connection for a provider that needs SSH (to claim a static machine): it
    takes an Endpoint and returns a Transport. `settle_host_key` takes an Endpoint without a pinned
    key, has the user confirm its fingerprint once, and returns the Endpoint with the key.
    `resolve_alias` takes a host's name and returns its Endpoint from the user's own ssh_config;
    None if that must not be read. `base_image`, `wheelhouse`, `package_index` are for every build.
    `place` tells this machine apart from others that the owner works from; "" for the only one.
    `talk` opens a line-by-line channel to a forced command: it takes an Endpoint and the request,
    and returns an object with `ask` and `close`. `student_key` is the private key that courses
    know. `cache_dir` may be deleted at any time. `everywhere` searches every region, not only the
    configured ones; `regions` are searched in addition, because resources on record may be there.
    `subject` is whose commands the provider's checks name. `note` shows a message to the user.
    `home` is the directory of the user's keys: two users of one Docker Engine may have the same
    login name, as root in containers. Home directories with the same `cache_pool` share caches.
    `open_provider` returns another provider by its name, with the lab's settings for it.
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
    subject: Subject = LAB
    note: Callable[[str], None] = lambda text: None
    open_provider: Callable[[str], Any] | None = None
    home: Path | None = None
    cache_pool: str = ""

    @property
    def cache_owner(self) -> str:
        """Whose image caches on this machine are used: those of this user with this home."""
        if self.cache_pool:
            return self.cache_pool
        return f"{self.owner}:{self.home}" if self.home else self.owner


class Provider(Protocol):
    """What every provider implements. Every method may raise ProviderError and its subclasses.

    `settle_s` is how long the provider may not show a server that it has just created.
    """

    name: ClassVar[str]
    settings_type: ClassVar[type[Value]]
    settle_s: float

    def __init__(self, settings: Any, context: ProviderContext) -> None: ...

    def get_account(self) -> ProviderAccount:
        """Return the account of the credentials in use; ProviderAccount() without accounts.

        Every server that `create`, `find` and `servers` return has its id. labctl refuses to act
        on a server of another account, and treats an absent one as gone only in its own account.
        """

    def check(self, need: Need | None = None) -> list[Check]:
        """Check credentials, quota for the need, engine: one Check each, with the fix."""

    def offers(self, need: Need) -> list[Offer]:
        """List the offers that fit the need, the best first.

        Without any, either return none or raise NoOfferError, which says what each condition ruled
        out.
        """

    def create(self, offer: Offer, request: CreateServerRequest) -> Server:
        """Create a server and return at once; the same token returns the same server.

        CapacityError: the next offer may work. QuotaError, DeniedError, CredentialsError: no offer
        will. BuildError: the server's image did not build. ThrottledError and BusyError: repeat the
        same request later. After any other error it is unknown whether the server was created;
        repeating the request finds out.
        """

    def find(self, server_id: str) -> Server | None:
        """Return the server as it is now; None if the provider does not show it (yet)."""

    def servers(self) -> list[Server]:
        """List every server with labctl's tag."""

    def terminate(self, server_id: str) -> None:
        """Terminate a server. An absent server counts as success."""

    def leftovers(self) -> list[Resource]:
        """List every other resource with labctl's tag, with its price."""

    def remove(self, resource: Resource) -> None:
        """Remove one of the leftovers. An absent one counts as success."""


@runtime_checkable
class Stoppable(Protocol):
    """A server can be stopped: it no longer costs money for compute, and its disk stays."""

    def stop(self, server_id: str) -> None: ...

    def start(self, server_id: str) -> None: ...


@runtime_checkable
class NamedMachines(Protocol):
    """Servers are machines that the settings name, so each of them can be chosen."""

    def list_machine_names(self) -> tuple[str, ...]:
        """List the machines in their configured order. Contacts nobody."""

    def select_machine(self, name: str) -> Provider:
        """Return a provider that has only this machine."""

    def open_machine(self, name: str) -> Any:
        """Return a Transport to the machine. ConnectError if it does not answer."""


@runtime_checkable
class OnThisMachine(Protocol):
    """Servers are containers on this machine, so nobody else controls them."""

    on_this_machine: ClassVar[bool]


@runtime_checkable
class LogsInAsUser(Protocol):
    """labctl logs in to the servers as the user's own ssh does, without a key pair of its own."""

    logs_in_as_user: ClassVar[bool]


@runtime_checkable
class RequiresSettings(Protocol):
    """The provider's section of lab.yaml has settings without which it finds no server.

    `settings_example` is this section with examples, for a new lab.yaml; "" if users do not write
    it themselves.
    """

    settings_example: ClassVar[str]

    def check_settings(self) -> None:
        """UsageError if they are missing. Contacts nobody."""


@runtime_checkable
class CredentialSource(Protocol):
    """The provider needs credentials, which this machine may have."""

    @property
    def has_credentials(self) -> bool:
        """Whether this machine has credentials for the provider. Contacts nobody."""

    def check_credentials(self) -> Check:
        """Check that they work, and nothing else."""


@runtime_checkable
class ClockSource(Protocol):
    """The provider refuses requests with a wrong time, so that this machine's clock matters."""

    @property
    def clock_url(self) -> str:
        """An http:// address of the provider; with a wrong clock, no certificate is valid."""


@runtime_checkable
class OpensBuckets(Protocol):
    """The provider's credentials also open S3 buckets."""

    @property
    def s3_profile(self) -> str:
        """The profile of ~/.aws/config that selects them; "" for those that AWS's tools use."""

    @property
    def missing_bucket_setup(self) -> str:
        """What its servers lack to write to a bucket; "" if nothing is known."""


@runtime_checkable
class Leasable(Protocol):
    """A server is leased for a time, and work on it renews the lease."""

    def extend(self, server_id: str, span_s: int) -> Server | None:
        """Have the lease end `span_s` seconds from now; None if it has ended already."""


@runtime_checkable
class BuildsJobs(Protocol):
    """The runs of a lab may be jobs, with options that the provider knows."""

    def build_job_request(self, need: Need, offer: Offer) -> JobRequest:
        """Say what a job of a lab asks of the cluster. `offer` is that of its login node."""


@runtime_checkable
class RunsWithoutEngine(Protocol):
    """Its servers have no Docker Engine, and none can run there: each run is a plain process.

    `no_engine` says why, for users.
    """

    no_engine: ClassVar[str]


@runtime_checkable
class SubmitsJobs(BuildsJobs, Protocol):
    """The server is a login node that others use too, and each run is a job of its cluster.

    `job_executor` is the executor that submits them, and the only one of such a server. Nothing is
    installed there, and no watchdog runs there.
    """

    job_executor: ClassVar[str]

    def remove_files(self, lab: str, lab_id: str) -> None:
        """Remove the directory of a lab whose results were saved, or given up by the user."""


@runtime_checkable
class Deadline(Protocol):
    """A timer at the provider ends the server, even if the machine hangs."""

    @property
    def missing_deadline_setup(self) -> str:
        """What must be set up before a timer can be set, for users; "" if nothing is missing."""

    def set_deadline(self, server_id: str, at: float) -> None:
        """Have the server end at `at` (Unix seconds); replaces any earlier setting.

        DeniedError if the account lacks the permission: the server then ends only by itself.
        """


@runtime_checkable
class CreatesByList(Protocol):
    """Its cloud creates a server for each request, so `create` first lists those of the token.

    A request that another process has sent is repeated only once the list must show its server.
    """

    creates_by_list: ClassVar[bool]


@runtime_checkable
class FixedTimer(Protocol):
    """A timer at the provider, fixed when a server is created, ends it even if it hangs.

    `Server.deadline_at` says when. It allows for extensions, so it is later than the deadline.
    """

    fixed_timer: ClassVar[bool]


@runtime_checkable
class EndsBilling(Protocol):
    """Some of a server's guards end its costs, and not only stop the machine.

    `ends_billing` names them: "shutdown" if a machine that powers itself off costs nothing
    anymore but its disk, "timer" if one that its Deadline or FixedTimer ends costs no more than
    that.
    """

    ends_billing: ClassVar[frozenset[str]]


@runtime_checkable
class Guarded(Protocol):
    """Somebody else creates the servers, arms their watchdogs and alone changes their limits."""

    def get_guarded_lab_id(self, server_id: str) -> str:
        """Return the id of the lab that the server's watchdog was armed for."""

    def extend_life(self, server_id: str, span_s: int) -> WatchRecord | None:
        """Extend the server's life by `span_s` seconds; PolicyError beyond what is allowed.

        Returns the watchdog's report if this side could read it, otherwise None.
        """


@runtime_checkable
class Joinable(Protocol):
    """`up` may join a server that other labs hold, instead of a new one."""

    def find_joinable(self) -> Server | None:
        """Return the running server that `up` would join, None without one."""


@runtime_checkable
class FirstBoot(Protocol):
    """The machine sets itself up from a script that is part of `create`, host key included."""

    def build_first_boot(self, boot: Boot) -> str:
        """Build the script for CreateServerRequest.first_boot. UsageError if it is too large."""

    def pin(self, server_id: str, host_key: str, next_host_key: str = "") -> None:
        """Write the trusted host keys into the server's tags."""


@runtime_checkable
class SlowFirstBoot(FirstBoot, Protocol):
    """A new machine takes longer than elsewhere, and its sshd starts before its script has run.

    `running_deadline_s` is how long it may take until it runs, `host_key_deadline_s` how long it
    may then show another host key than that of the script. Nobody logs in meanwhile.
    """

    running_deadline_s: ClassVar[float]
    host_key_deadline_s: ClassVar[float]


@runtime_checkable
class Firewall(Protocol):
    """The provider admits ssh only from known addresses."""

    def admit(self, server_id: str) -> str:
        """Admit the caller's present address; return it if it was not admitted before, else ""."""


@runtime_checkable
class Keep(Protocol):
    """A server's disk can outlive it."""

    @property
    def can_keep_itself(self) -> bool:
        """Whether its servers have the permission to keep their disks themselves when they end."""

    def keep_disk(self, server_id: str, expires_at: float) -> list[Resource]:
        """Have the server's own disks outlive it, tagged with the expiry (Unix seconds).

        Returns them with their prices. While the server lives, `leftovers` shows them as parts of
        it, without an expiry. Repeated calls move the expiry.
        """

    def release_disk(self, server_id: str) -> None:
        """Have the server's own disks end with it again. An absent server counts as success."""

    def attach_kept_disk(self, resource: Resource, server_id: str) -> str:
        """Attach a kept disk to a server; return the name of the device there."""


@runtime_checkable
class Explains(Protocol):
    """The provider can say why a server has ended."""

    def explain_end(self, server_id: str) -> str:
        """Return the reason as text for users; "" if unknown."""


@runtime_checkable
class ReclaimNoticeSource(Protocol):
    """Servers learn of their reclaim from a metadata service other than EC2's.

    `notice_service` is its name, one of labctl/agent/watchdog/notice_services.py.
    """

    notice_service: ClassVar[str]


@runtime_checkable
class Reclaimable(Protocol):
    """A server can be reclaimed on request, as its provider might do by itself: for drills.

    `no_notice` says, for users, why the provider gives no notice on request; "" if that needs no
    reason.
    """

    no_notice: ClassVar[str]

    def reclaim(self, server_id: str, notice_s: float) -> bool:
        """Give notice now and reclaim the server `notice_s` later; return at once.

        Returns False, and does nothing, if the provider gives no notice on request. With 0 the
        server ends at once and without notice, its disk with it. Raises if the server is absent.
        """


class QuotaRoom(Value, frozen=True):
    """How many machines of an offer's type an account may have at once; None if unknown.

    `quota` names the quota that limits them: `limit` in `units`, of which one machine takes
    `each`. `code` is the provider's code for it, `next` the page or action that raises it.
    """

    most: int | None = None
    quota: str = ""
    code: str = ""
    units: str = ""
    limit: float | None = None
    each: float = 1.0
    next: str = ""


@runtime_checkable
class QuotaSource(Protocol):
    """The account's quotas can be queried, so that a class is planned weeks ahead."""

    def compute_room(self, offer: Offer) -> QuotaRoom:
        """Compute how many of these fit into the account's quota, including those running now."""


@runtime_checkable
class Bake(Protocol):
    """The provider can create a machine image from a server, and boot others from it."""

    def bake(self, server_id: str, name: str, tags: dict[str, str]) -> str:
        """Start to create an image, and return its id at once. The server may restart for it."""

    def get_image_state(self, image_id: str) -> str:
        """Return the state of an image: "pending", "ready", or why it cannot be used."""

    @classmethod
    def with_image(cls, settings: Any, image_id: str) -> Any:
        """Return settings with which servers boot from this image."""

    def estimate_image_usd_per_month(self) -> float:
        """Return the most that an image of one of this provider's servers costs per month."""


@runtime_checkable
class ConnectsGangs(Protocol):
    """The provider places the servers of one gang on purpose, and says how in the plan."""

    def describe_gang(self, offer: Offer) -> str:
        """Say in one line for users how servers of this offer will be connected."""


@runtime_checkable
class ConsoleSource(Protocol):
    """The provider can show what a machine printed while booting, for when SSH never opens."""

    def read_console(self, server_id: str) -> str: ...


@runtime_checkable
class CatalogOffers(Protocol):
    """The provider's prices can be read without an account, from a public catalog."""

    def list_catalog_offers(self, need: Need) -> list[Offer]:
        """List the offers that fit the need at list prices; `priced_at` says how old they are.

        Nobody knows whether there is capacity. LabError if the catalog cannot be read.
        """


class OfferBatch(Value, frozen=True):
    """What one provider offers for a need, or why it offers nothing.

    `is_live`: the prices come from the provider itself, with the user's credentials; otherwise from
    a public catalog. `failure` says why the provider could not be asked, or did not answer in time.
    `left_out` says why it was not asked at all.
    """

    provider: str
    offers: tuple[Offer, ...] = ()
    is_live: bool = True
    failure: str = ""
    left_out: str = ""


@runtime_checkable
class Marketplace(Protocol):
    """The servers come from other providers: each offer names the one that creates its server."""

    def gather_offers(self, need: Need) -> list[OfferBatch]:
        """Ask every provider at once; one entry for each. One that fails is no error."""

    def open_members(self) -> list[Provider]:
        """Open the providers that can create servers: set up, and with credentials."""

    def explain_left_out(self) -> dict[str, str]:
        """Say why each other one can create none, by its name. Contacts nobody."""


# The provider that asks all others.
MARKET = "auto"
# labctl's own entry points, repeated here: looking up what is installed takes 15 ms.
BUILT_IN = {
    "auto": "labctl.providers.auto:AutoProvider",
    "aws": "labctl.providers.aws:AwsProvider",
    "azure": "labctl.providers.azure:AzureProvider",
    "course": "labctl.providers.course:CourseProvider",
    "gcp": "labctl.providers.gcp:GcpProvider",
    "lambda": "labctl.providers.lambda_cloud:LambdaProvider",
    "local": "labctl.providers.local:LocalProvider",
    "runpod": "labctl.providers.runpod:RunPodProvider",
    "slurm": "labctl.providers.slurm:SlurmProvider",
    "static": "labctl.providers.static:StaticProvider",
    "vast": "labctl.providers.vast:VastProvider",
}
SUMMARIES = {
    "auto": "the cheapest of all providers that you have credentials for; may cost money",
    "aws": "the cheapest fitting instance at AWS; costs money",
    "azure": "the cheapest fitting machine at Azure; costs money",
    "course": "the server that your course gives you; use labctl join FILE instead",
    "gcp": "the cheapest fitting machine at Google Cloud; costs money",
    "lambda": "a GPU instance at Lambda; costs money",
    "local": "a container on this machine (needs Docker; no GPU)",
    "runpod": "a container with GPUs at RunPod; costs money",
    "slurm": "a cluster with Slurm, whose login node you reach with ssh",
    "static": "existing machines that you reach with ssh",
    "vast": "a virtual machine with GPUs from Vast.ai's marketplace; costs money",
}


def list_provider_names() -> list[str]:
    """List the names of all installed providers."""
    return sorted(entry.name for entry in metadata.entry_points(group="labctl.providers"))


def is_installed(name: str) -> bool:
    """Whether a provider has that name, without loading it."""
    return name in BUILT_IN or name in list_provider_names()


def describe_provider(name: str) -> str:
    """Describe in a few words where the provider's servers come from."""
    return SUMMARIES.get(name, "from a plugin package")


def get_provider_class(name: str) -> type[Provider]:
    """Return the class that is registered as `name`; the error lists the installed ones."""
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        built_in: type[Provider] = getattr(import_alone(module), attribute)
        return built_in
    for entry in metadata.entry_points(group="labctl.providers", name=name):
        loaded: type[Provider] = entry.load()
        return loaded
    names = list_provider_names()
    near = reader.find_nearest(name, names)
    raise UnknownNameError(
        f"there is no provider called {name!r}",
        typed=name,
        near=near,
        why=f"{f'did you mean {near}? ' if near else ''}installed: {', '.join(names)}",
        hint="labctl config",
    )
