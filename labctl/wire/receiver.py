"""Messages between a student's machine and the receiver of submissions, a line of JSON each.

Receipts and feedback are documents of `labctl.submissions` with a version of their own. They pass
through as they were signed or released, and are checked where they are read. A bundle is named by
its SHA-256 in hex and its size in bytes. A failure is {"error": {kind, what, why, hint}}.
"""

from typing import NamedTuple, Optional, Tuple, Union

from .verbs import Verb


class GreetReceiverRequest(NamedTuple):
    """Ask for the rules for this student now."""

    assignment: str


class DeadlineRecord(NamedTuple):
    """What the rules say now; see `labctl.submissions.assignment.DeadlineStatus`."""

    due_at: Optional[int]
    closes_at: Optional[int]
    accepted: bool
    late_s: int = 0
    penalty: int = 0
    in_grace_s: int = 0


class ReceiverGreetingRecord(NamedTuple):
    """The rules for a student; see `labctl.submissions.receiver.Hello`."""

    student: str
    now: int
    rules: DeadlineRecord
    due: str
    late: int
    penalty: int
    max_bytes: int
    receiver: str
    number: int
    grace_s: int = 0
    free_days: int = 0
    free_days_left: int = 0


class GreetReceiverReply(NamedTuple):
    hello: ReceiverGreetingRecord


class BeginUploadRequest(NamedTuple):
    assignment: str
    sha256: str
    size: int


class BeginUploadReply(NamedTuple):
    """The bytes of the bundle that have arrived; or its receipt, if it was accepted before."""

    offset: Optional[int] = None
    signed: object = None


class SendPartRequest(NamedTuple):
    """A part of the bundle: `length` bytes follow the line, for `offset`."""

    assignment: str
    sha256: str
    size: int
    offset: int
    length: int


class SendPartReply(NamedTuple):
    offset: int


class FinishUploadRequest(NamedTuple):
    assignment: str
    sha256: str
    size: int


class FinishUploadReply(NamedTuple):
    signed: object


class ListReceiptsRequest(NamedTuple):
    """List the student's own receipts."""

    assignment: str


class ListReceiptsReply(NamedTuple):
    """The receipts as they were signed, and for each what the rules and extensions of now say.

    `standings` is empty from a receiver of an earlier version.
    """

    receipts: Tuple[object, ...]
    standings: Tuple[DeadlineRecord, ...] = ()


class ReadFeedbackRequest(NamedTuple):
    """Ask for the student's own feedback."""

    assignment: str


# Characters of a regrade request.
MOST_REGRADE_CHARS = 1000


class RegradeRecord(NamedTuple):
    """A student's request to grade again; `answered_at` is 0 before staff has answered."""

    number: int
    at: float
    text: str
    answer: str = ""
    accepted: bool = False
    answered_at: float = 0.0


class TotalRecord(NamedTuple):
    """A student's total over the assignments, `final` of `points`.

    `dropped` says which grades do not count, and why; `missing` names the assignments that count as
    0 because nothing was submitted. If groups of assignments have weights, `final` is a percentage,
    and `groups` describes what it is made of.
    """

    final: float
    points: float
    dropped: Tuple[str, ...] = ()
    missing: Tuple[str, ...] = ()
    groups: Tuple[str, ...] = ()


class ReadFeedbackReply(NamedTuple):
    """The feedback, None before its release, and the student's requests to grade again.

    `total` is None if the course computes none.
    """

    feedback: object
    regrades: Tuple[RegradeRecord, ...] = ()
    total: Optional[TotalRecord] = None


class AskRegradeRequest(NamedTuple):
    """Ask staff to grade the student's own submission again."""

    assignment: str
    text: str


class AskRegradeReply(NamedTuple):
    """The number of the request, from 1."""

    number: int


ReceiverRequest = Union[
    GreetReceiverRequest,
    BeginUploadRequest,
    SendPartRequest,
    FinishUploadRequest,
    ListReceiptsRequest,
    ReadFeedbackRequest,
    AskRegradeRequest,
]
GREET_RECEIVER = Verb("hello", GreetReceiverRequest, GreetReceiverReply)
BEGIN_UPLOAD = Verb("begin", BeginUploadRequest, BeginUploadReply)
SEND_PART = Verb("part", SendPartRequest, SendPartReply)
FINISH_UPLOAD = Verb("finish", FinishUploadRequest, FinishUploadReply)
LIST_RECEIPTS = Verb("receipts", ListReceiptsRequest, ListReceiptsReply)
READ_FEEDBACK = Verb("feedback", ReadFeedbackRequest, ReadFeedbackReply)
ASK_REGRADE = Verb("regrade", AskRegradeRequest, AskRegradeReply)
