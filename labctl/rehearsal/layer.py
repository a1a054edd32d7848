"""The WSGI layer above moto: counts calls, injects faults, and answers calls or passes them on."""

from __future__ import annotations

import re
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn
from wsgiref.types import StartResponse, WSGIEnvironment

import msgspec

from labctl.errors import LabError
from labctl.model import Value
from labctl.rehearsal import limits, market, pricelist
from labctl.rehearsal.backend import Backend
from labctl.rehearsal.calls import (
    Call,
    HttpReply,
    build_json_reply,
    build_refusal,
    build_xml_reply,
    parse_reply,
)
from labctl.rehearsal.faults import Faults
from labctl.rehearsal.fleet import Fleet
from labctl.rehearsal.instances import InstanceHandlers
from labctl.rehearsal.scenario import Scenario
from labctl.rehearsal.schedules import Schedules

# A header that a web page cannot send to another origin without a preflight request.
CONTROL_HEADER = "HTTP_X_LABCTL_REHEARSAL"
# Host names of this machine that a page cannot rebind by DNS.
LOCAL = ("127.0.0.1", "localhost")
# In the environment of calls that come from a machine.
INSIDE = "rehearsal.inside"
PRESIGNED = re.compile(r"(?:X-Amz-Credential|AWSAccessKeyId)=")
INGRESS_ACTIONS = (
    "AuthorizeSecurityGroupIngress",
    "RevokeSecurityGroupIngress",
    "ModifySecurityGroupRules",
    "ModifyInstanceAttribute",
    "ModifyNetworkInterfaceAttribute",
)
NOT_FOUND = HttpReply(status=404, body=b"this is a rehearsal of AWS; calls are signed\n")
Operation = Callable[[Call], HttpReply | None]
Control = Callable[[str, bytes], Value]


class ControlError(Value, frozen=True):
    """The reply to a control request that failed."""

    error: str


class Layer:
    """A WSGI application. `control` answers POST /rehearsal/NAME with its JSON body."""

    def __init__(
        self,
        backend: Backend,
        fleet: Fleet,
        schedules: Schedules,
        scenario: Callable[[], Scenario],
        control: Control,
        address: Callable[[], str],
    ) -> None:
        self.calls: Counter[str] = Counter()
        self.held: Counter[str] = Counter()
        self.under_way = 0
        self.faults = Faults()
        self._lock = threading.Lock()
        self._backend = backend
        self._fleet = fleet
        self._scenario = scenario
        self._control = control
        self._address = address
        ec2 = InstanceHandlers(backend, fleet, scenario).operations
        self._operations: dict[str, Operation] = {
            **{f"ec2:{name}": operation for name, operation in ec2.items()},
            "ec2:DescribeSpotPriceHistory": lambda c: market.answer_price_history(
                c, scenario(), backend
            ),
            "ec2:GetSpotPlacementScores": self._scores,
            "ec2:DescribeRegions": self._regions,
            "pricing:GetProducts": lambda c: pricelist.answer_products(c, scenario(), backend),
            "scheduler:CreateSchedule": schedules.put_schedule,
            "scheduler:UpdateSchedule": schedules.put_schedule,
            **{f"ec2:{name}": self._ingress for name in INGRESS_ACTIONS},
        }

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/checkip":
            reply = HttpReply(status=200, body=f"{self._address()}\n".encode())
        elif environ["PATH_INFO"].startswith("/rehearsal/"):
            reply = self._handle_control(environ)
        else:
            with self._count_call():
                call = Call(environ)
                reply = self._answer(call)
            if reply.status == 0:
                self._lose(call, reply.hold_s)
        head = environ["REQUEST_METHOD"] == "HEAD"
        start_response(f"{reply.status} -", list(reply.headers) if head else _headers(reply))
        return [reply.body]

    def inside(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Serve machines: the same application without the control requests."""
        return self({**environ, INSIDE: True}, start_response)

    def _answer(self, call: Call) -> HttpReply:
        if not call.service:
            query = call.environ.get("QUERY_STRING", "")
            return self._backend.apply(call) if PRESIGNED.search(query) else NOT_FOUND
        scenario = self._scenario()
        with self._lock:
            self.calls[call.action] += 1
        if scenario.delays.api:
            time.sleep(scenario.delays.api)
        reply = self.faults.intercept(call, scenario)
        if reply is not None:
            return reply
        return self.faults.lose_reply(call, scenario, self._apply(call, scenario))

    @contextmanager
    def _count_call(self) -> Iterator[None]:
        """Count a call while it is being answered."""
        with self._lock:
            self.under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self.under_way -= 1

    def _lose(self, call: Call, hold_s: float) -> NoReturn:
        """Close the connection below the server, so that the caller gets no response."""
        wire = call.environ["werkzeug.socket"]
        if hold_s:
            with self._lock:
                self.held[call.action] += 1
            # A waiting caller sends nothing: the socket becomes readable when the caller is gone.
            select.select([wire], [], [], hold_s)
        wire.shutdown(socket.SHUT_RDWR)
        raise ConnectionAbortedError("the rehearsal loses this reply")

    def _apply(self, call: Call, scenario: Scenario) -> HttpReply:
        if call.service == "ec2" and call.region not in self._backend.regions:
            words = f"You are not subscribed to this service in {call.region}."
            return build_refusal(call, "OptInRequired", words, 403)
        if call.service == "servicequotas":
            quota_reply = limits.answer_quotas(call, scenario, self._backend.account)
            if quota_reply is not None:
                return quota_reply
        operation = self._operations.get(call.name)
        reply = operation(call) if operation is not None else None
        return self._backend.apply(call) if reply is None else reply

    def _ingress(self, call: Call) -> HttpReply:
        reply = self._backend.apply(call)
        if reply.status == 200 and not call.dry:
            self._fleet.apply_ingress(call.region)
        return reply

    def _scores(self, call: Call) -> HttpReply | None:
        return (
            None
            if call.dry
            else market.answer_placement_scores(call, self._scenario(), self._backend)
        )

    def _regions(self, call: Call) -> HttpReply:
        """Return moto's response, with the scenario's regions only."""
        reply = self._backend.apply(call)
        if reply.status != 200:
            return reply
        root = parse_reply(reply)
        region_set = root.find("regionInfo")
        for item in list(region_set if region_set is not None else []):
            if item.findtext("regionName") not in self._backend.regions and region_set is not None:
                region_set.remove(item)
        return build_xml_reply(root)

    def _handle_control(self, environ: WSGIEnvironment) -> HttpReply:
        """Handle a control request of a later command, or of a test in another process."""
        host = environ.get("HTTP_HOST", "").rpartition(":")[0]
        if not environ.get(CONTROL_HEADER) or host not in LOCAL or environ.get(INSIDE):
            return NOT_FOUND
        length = int(environ.get("CONTENT_LENGTH") or 0)
        try:
            body = environ["wsgi.input"].read(length) or b"{}"
            return build_json_reply(self._control(environ["PATH_INFO"].rpartition("/")[2], body))
        except (LabError, ValueError, TypeError, KeyError, msgspec.MsgspecError) as error:
            return build_json_reply(ControlError(error=str(error)), 400)


def _headers(reply: HttpReply) -> list[tuple[str, str]]:
    headers = [pair for pair in reply.headers if pair[0].lower() != "content-length"]
    return [*headers, ("Content-Length", str(len(reply.body)))]
