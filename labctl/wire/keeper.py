"""Messages between a student's machine and the keeper of a course, a line of JSON each.

Needs, offers and servers are those of `labctl.model`, whose shape is checked where they are read.
A failure is {"error": {kind, what, why, hint}}.
"""

from typing import Dict, NamedTuple, Optional, Tuple, Union

from .verbs import Verb


class CourseRecord(NamedTuple):
    """A course as a student gets it.

    `receiver` is the public key that verifies receipts. `assignments` has the text of each file.
    """

    course: str
    student: str
    image: str = ""
    receiver: str = ""
    assignments: Optional[Dict[str, str]] = None


class EnrolRequest(NamedTuple):
    """Exchange the code of a join file for this key, as a line of authorized_keys."""

    public_key: str


class EnrolReply(NamedTuple):
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
    seat: str = ""
    seat_id: str = ""
    shared: bool = False
    allowance_usd: Optional[float] = None
    spent_usd: float = 0.0
    ttl_s: int = 0
    max_ttl_s: int = 0


class GreetKeeperReply(NamedTuple):
    hello: SeatGreetingRecord
    version: int = 1


class ListOffersRequest(NamedTuple):
    need: Dict[str, object]


class ListOffersReply(NamedTuple):
    offers: Tuple[object, ...]
    version: int = 1


class CreateSeatServerRequest(NamedTuple):
    """Claim the seat's server for a lab. `token` is random, and the same in a repeated request."""

    lab: str
    lab_id: str
    token: str
    public_key: str
    offer: Dict[str, object]


class CreateSeatServerReply(NamedTuple):
    server: object
    version: int = 1


class FindSeatServerRequest(NamedTuple):
    """Find a server. The reply may take `wait_s` seconds while it is being created."""

    id: str
    wait_s: int


class FindSeatServerReply(NamedTuple):
    """The server, None if the student has no such server."""

    server: object
    version: int = 1


class ListSeatServersRequest(NamedTuple):
    """List the student's own servers."""


class ListSeatServersReply(NamedTuple):
    servers: Tuple[object, ...]
    version: int = 1


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
    server: object
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
]
ENROL = Verb("enrol", EnrolRequest, EnrolReply)
GREET_KEEPER = Verb("hello", GreetKeeperRequest, GreetKeeperReply)
LIST_OFFERS = Verb("offers", ListOffersRequest, ListOffersReply)
CREATE_SEAT_SERVER = Verb("create", CreateSeatServerRequest, CreateSeatServerReply)
FIND_SEAT_SERVER = Verb("find", FindSeatServerRequest, FindSeatServerReply)
LIST_SEAT_SERVERS = Verb("servers", ListSeatServersRequest, ListSeatServersReply)
END_SEAT_SERVER = Verb("terminate", EndSeatServerRequest, EndSeatServerReply)
EXPLAIN_SEAT_END = Verb("ended", ExplainSeatEndRequest, ExplainSeatEndReply)
EXTEND_SEAT_SERVER = Verb("extend", ExtendSeatServerRequest, ExtendSeatServerReply)
