"""Messages between a student's machine and the keeper of a course, a line of JSON each.

Records of needs, offers and servers have the fields of `labctl.model`, which describes them.
A failure is {"error": {kind, what, why, hint}}.
"""

from typing import Dict, NamedTuple, Optional, Tuple, Union

from .verbs import Verb

# bytes of one part of a starter, and of the largest starter that is accepted
STARTER_PART_BYTES, STARTER_MOST_BYTES = 512 * 1024, 32 * 1024 * 1024
SAVED_PART_BYTES = 2 * 1024 * 1024


class CourseRecord(NamedTuple):
    """A course as a student gets it.

    `receiver` is the public key that verifies receipts. `assignments` has the text of each file,
    `starters` the sha256 of each assignment's starter. `executor` is that of lab.yaml, "" for the
    default one.
    """

    course: str
    student: str
    image: str = ""
    receiver: str = ""
    assignments: Optional[Dict[str, str]] = None
    starters: Optional[Dict[str, str]] = None
    executor: str = ""


class EnrollRequest(NamedTuple):
    """Exchange the code of a join file for this key, as a line of authorized_keys."""

    public_key: str


class EnrollReply(NamedTuple):
    joined: CourseRecord
    version: int = 1


class GreetKeeperRequest(NamedTuple):
    """Ask for the course, and the seat's dollars and limits."""


class SeatGreetingRecord(NamedTuple):
    """A course, and the seat of the student in it. An allowance of None has no limit."""

    course: str
    student: str
    image: str = ""
    receiver: str = ""
    assignments: Optional[Dict[str, str]] = None
    starters: Optional[Dict[str, str]] = None
    seat: str = ""
    seat_id: str = ""
    shared: bool = False
    allowance_usd: Optional[float] = None
    spent_usd: float = 0.0
    ttl_s: int = 0
    max_ttl_s: int = 0
    executor: str = ""


class GreetKeeperReply(NamedTuple):
    hello: SeatGreetingRecord
    version: int = 1


class GpuNeedRecord(NamedTuple):
    kind: str = "auto"
    count: int = 0  # type: ignore[assignment]  # tuple.count
    min_memory_bytes: int = 0


class NeedRecord(NamedTuple):
    gpu: GpuNeedRecord = GpuNeedRecord()
    type: str = ""
    arch: str = ""
    work: str = ""
    spot: str = "prefer"
    max_price_usd_per_hour: Optional[float] = None
    budget_usd: Optional[float] = None
    ttl_s: Optional[int] = None
    max_ttl_s: Optional[int] = None
    idle_s: Optional[int] = None
    deadline: bool = True


class OfferRecord(NamedTuple):
    provider: str
    type: str
    region: str = ""
    zone: str = ""
    cpus: int = 0
    memory_bytes: int = 0
    arch: str = ""
    gpu_name: str = ""
    gpu_count: int = 0
    gpu_memory_bytes: int = 0
    price_usd_per_hour: float = 0.0
    spot: bool = False
    on_demand_usd_per_hour: Optional[float] = None
    week_low_usd_per_hour: Optional[float] = None
    week_high_usd_per_hour: Optional[float] = None
    placement_score: Optional[int] = None
    priced_at: float = 0.0
    free_gpus: int = 0
    all_gpus: int = 0
    cluster_placement: bool = False
    rdma: bool = False


class EndpointRecord(NamedTuple):
    host: str
    port: int = 22
    user: str = "student"
    identity: str = ""
    jump: str = ""
    proxy_command: str = ""
    host_key: str = ""
    next_host_key: str = ""


class SeatServerRecord(NamedTuple):
    id: str
    provider: str
    lab: str
    lab_id: str
    alias: str
    endpoint: EndpointRecord
    offer: OfferRecord
    created_at: float
    state: str = "starting"
    deadline_at: Optional[float] = None
    account: str = ""
    owner: str = ""
    moving: str = ""


class ListOffersRequest(NamedTuple):
    need: NeedRecord


class ListOffersReply(NamedTuple):
    offers: Tuple[OfferRecord, ...]
    version: int = 1


class CreateSeatServerRequest(NamedTuple):
    """Claim the seat's server for a lab. `token` is random, and the same in a repeated request."""

    lab: str
    lab_id: str
    token: str
    public_key: str
    offer: OfferRecord


class CreateSeatServerReply(NamedTuple):
    server: SeatServerRecord
    version: int = 1


class FindSeatServerRequest(NamedTuple):
    """Find a server. The reply may take `wait_s` seconds while it is being created."""

    id: str
    wait_s: int


class FindSeatServerReply(NamedTuple):
    """The server, None if the student has no such server."""

    server: Optional[SeatServerRecord]
    version: int = 1


class ListSeatServersRequest(NamedTuple):
    """List the servers that the student's labs hold."""


class ListSeatServersReply(NamedTuple):
    """`seat_server` is the seat's running server, which a lab that does not hold it can join."""

    servers: Tuple[SeatServerRecord, ...]
    version: int = 1
    seat_server: Optional[SeatServerRecord] = None


class EndSeatServerRequest(NamedTuple):
    id: str


class EndSeatServerReply(NamedTuple):
    version: int = 1


class ExplainSeatEndRequest(NamedTuple):
    id: str


class SeatEndRecord(NamedTuple):
    """Why and when a seat's server ended. `saved` says where its results are: "home" or "disk"."""

    at: float
    why: str = ""
    saved: str = ""


class ExplainSeatEndReply(NamedTuple):
    """The end of the seat's last server, None if it has one."""

    ended: Optional[SeatEndRecord]
    version: int = 1


class ExtendSeatServerRequest(NamedTuple):
    id: str
    seconds: int


class ExtendSeatServerReply(NamedTuple):
    server: Optional[SeatServerRecord]
    version: int = 1


class FetchStarterRequest(NamedTuple):
    """Fetch a part of an assignment's starter of this `sha256`, from `offset` on."""

    assignment: str
    sha256: str
    offset: int


class FetchStarterReply(NamedTuple):
    """At most STARTER_PART_BYTES of the starter, in base64, and the size of the complete one."""

    data: str
    size_bytes: int
    version: int = 1


class ListSavedFilesRequest(NamedTuple):
    """List the results that the keeper saved of the student's seat when its servers ended."""


class SavedFileRecord(NamedTuple):
    """A saved file, with its path below the seat's runs."""

    path: str
    size_bytes: int


class ListSavedFilesReply(NamedTuple):
    files: Tuple[SavedFileRecord, ...]
    version: int = 1


class FetchSavedFileRequest(NamedTuple):
    """Fetch a part of a saved file, from `offset` on."""

    path: str
    offset: int


class FetchSavedFileReply(NamedTuple):
    """At most SAVED_PART_BYTES in base64, and the file's size; with the last part, its hash."""

    data: str
    size_bytes: int
    sha256: str = ""
    version: int = 1


KeeperRequest = Union[
    GreetKeeperRequest,
    ListOffersRequest,
    CreateSeatServerRequest,
    FindSeatServerRequest,
    ListSeatServersRequest,
    EndSeatServerRequest,
    ExplainSeatEndRequest,
    ExtendSeatServerRequest,
    FetchStarterRequest,
    ListSavedFilesRequest,
    FetchSavedFileRequest,
]
ENROLL = Verb("enrol", EnrollRequest, EnrollReply)
GREET_KEEPER = Verb("hello", GreetKeeperRequest, GreetKeeperReply)
LIST_OFFERS = Verb("offers", ListOffersRequest, ListOffersReply)
CREATE_SEAT_SERVER = Verb("create", CreateSeatServerRequest, CreateSeatServerReply)
FIND_SEAT_SERVER = Verb("find", FindSeatServerRequest, FindSeatServerReply)
LIST_SEAT_SERVERS = Verb("servers", ListSeatServersRequest, ListSeatServersReply)
END_SEAT_SERVER = Verb("terminate", EndSeatServerRequest, EndSeatServerReply)
EXPLAIN_SEAT_END = Verb("ended", ExplainSeatEndRequest, ExplainSeatEndReply)
EXTEND_SEAT_SERVER = Verb("extend", ExtendSeatServerRequest, ExtendSeatServerReply)
FETCH_STARTER = Verb("starter", FetchStarterRequest, FetchStarterReply)
LIST_SAVED_FILES = Verb("saved", ListSavedFilesRequest, ListSavedFilesReply)
FETCH_SAVED_FILE = Verb("saved-file", FetchSavedFileRequest, FetchSavedFileReply)
