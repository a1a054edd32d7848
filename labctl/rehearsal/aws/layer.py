"""The WSGI layer above moto: counts calls, injects faults, and answers calls or passes them on."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from wsgiref.types import StartResponse, WSGIEnvironment

from labctl.rehearsal.aws import limits, market, pricelist
from labctl.rehearsal.aws.backend import Backend
from labctl.rehearsal.aws.calls import Call, build_refusal, build_xml_reply, parse_reply
from labctl.rehearsal.aws.faults import Faults
from labctl.rehearsal.aws.fleet import Fleet
from labctl.rehearsal.aws.instances import InstanceHandlers
from labctl.rehearsal.aws.scenario import Scenario
from labctl.rehearsal.aws.schedules import Schedules
from labctl.rehearsal.core.control import INSIDE, PREFIX, Control, handle_control
from labctl.rehearsal.core.listener import lose_connection
from labctl.rehearsal.core.replies import HttpReply

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
        elif environ["PATH_INFO"].startswith(PREFIX):
            reply = handle_control(environ, self._control, NOT_FOUND)
        else:
            with self._count_call():
                call = Call(environ)
                reply = self._answer(call)
            if reply.status == 0:
                lose_connection(environ, reply.hold_s, lambda: self._count_held(call.action))
        head = environ["REQUEST_METHOD"] == "HEAD"
        start_response(f"{reply.status} -", list(reply.headers) if head else reply.list_headers())
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

    def _count_held(self, action: str) -> None:
        with self._lock:
            self.held[action] += 1

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
