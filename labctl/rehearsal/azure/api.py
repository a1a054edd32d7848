"""The API of the simulated Azure: its calls, its errors, and who may make them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import msgspec
from werkzeug.datastructures import Headers

from labctl.model import Value
from labctl.rehearsal.azure.account import ALL_QUOTA, SPOT_QUOTA, AzureAccount
from labctl.rehearsal.azure.hardware import FAMILIES, SIZE_LIST
from labctl.rehearsal.azure.machines import VmHandlers
from labctl.rehearsal.azure.pricelist import PricePage, build_page
from labctl.rehearsal.azure.resources import (
    ArmListing,
    ArmProblem,
    ArmProblemDocument,
    OperationState,
    Properties,
)
from labctl.rehearsal.azure.storage import PartHandlers
from labctl.rehearsal.core.operations import ApiCall, ApiError, ErrorReplies, NoBody, Operation
from labctl.rehearsal.core.replies import HttpReply
from labctl.rehearsal.core.validation import Validator

SUBSCRIPTION = "/subscriptions/<subscription>"
COMPUTE = f"{SUBSCRIPTION}/providers/Microsoft.Compute"
# Calls of other services, which need no token of this one.
OPEN = ("token", "checkip", "prices", "console")
TOKEN_S = 3600
WRITES = ("_CreateOrUpdate", "_UpdateAtScope", "_Start")


class TokenDocument(Value, frozen=True):
    """What a managed identity's endpoint answers."""

    access_token: str
    expires_on: str
    resource: str
    token_type: str = "Bearer"


class SubscriptionDocument(Value, frozen=True, rename="camel"):
    subscription_id: str
    state: str
    display_name: str = "Rehearsal"


class ProviderDocument(Value, frozen=True, rename="camel"):
    namespace: str
    registration_state: str


class AzureApi:
    """What the application needs to know about Azure."""

    errors = ErrorReplies(
        unauthorized=ApiError(401, "InvalidAuthenticationToken", "The access token is invalid."),
        expired=ApiError(401, "ExpiredAuthenticationToken", "The access token expired."),
        denied=ApiError(403, "AuthorizationFailed", "The client does not have authorization."),
        throttled=ApiError(429, "TooManyRequests", "Too many requests.", (("Retry-After", "2"),)),
        not_found=ApiError(404, "NotFound", "Not found"),
        invalid=ApiError(400, "InvalidRequestContent", "The content is not valid."),
        failed_code="InternalServerError",
    )

    def __init__(self, account: AzureAccount, url: str, caller: Callable[[], str]) -> None:
        self.validator: Validator | None = None
        self.secret = secrets.token_urlsafe(16)
        self._account = account
        self._url = url
        self._caller = caller
        self._tokens: set[str] = set()
        self._machines = VmHandlers(account, self._build_reply, url)
        self._parts = PartHandlers(account, self._build_reply)

    def list_operations(self) -> tuple[Operation[Any], ...]:
        arm = (*self._machines.list_operations(), *self._parts.list_operations(), *self._list_own())
        return (
            *(replace(one, handler=self._guard(one)) for one in arm),
            Operation("token", "GET", "/token", self._issue_token, NoBody),
            Operation("checkip", "GET", "/checkip", self._tell_address, NoBody),
            Operation("prices", "GET", "/prices", self._list_prices, NoBody),
        )

    def _list_own(self) -> tuple[Operation[Any], ...]:
        roles = (
            f"{SUBSCRIPTION}/resourceGroups/<group>/providers/Microsoft.Authorization/permissions"
        )
        operations = f"{COMPUTE}/locations/<region>/operations/<operation>"
        return (
            Operation("Subscriptions_Get", "GET", SUBSCRIPTION, self._get_subscription, NoBody),
            Operation(
                "Providers_Get",
                "GET",
                f"{SUBSCRIPTION}/providers/<namespace>",
                self._get_provider,
                NoBody,
            ),
            Operation("Permissions_List", "GET", roles, self._list_roles, NoBody),
            Operation("Operations_Get", "GET", operations, self._get_operation, NoBody),
            Operation(
                "Usage_List", "GET", f"{COMPUTE}/locations/<region>/usages", self._usages, NoBody
            ),
            Operation("ResourceSkus_List", "GET", f"{COMPUTE}/skus", self._skus, NoBody),
        )

    def check_access(self, name: str, headers: Headers) -> None:
        kind, _, token = headers.get("Authorization", "").partition(" ")
        if name not in OPEN and (kind != "Bearer" or token not in self._tokens):
            raise self.errors.unauthorized

    def write_error(self, error: ApiError) -> bytes:
        problem = ArmProblem(code=error.code, message=error.message)
        return msgspec.json.encode(ArmProblemDocument(error=problem))

    def write_result(self, result: Value) -> bytes:
        return msgspec.json.encode(result)

    def _guard(self, operation: Operation[Any]) -> Callable[[ApiCall[Any]], Any]:
        """Refuse calls for other subscriptions, and changes in one that is disabled."""

        def answer(call: ApiCall[Any]) -> Any:
            scenario = self._account.scenario()
            wanted = call.path.get("subscription", scenario.subscription)
            if wanted != scenario.subscription:
                text = f"The subscription '{wanted}' could not be found."
                raise ApiError(404, "SubscriptionNotFound", text)
            if operation.name.endswith(WRITES) and scenario.balance_usd <= 0:
                text = f"The subscription '{wanted}' is disabled and therefore marked as read only."
                raise ApiError(409, "ReadOnlyDisabledSubscription", text)
            return operation.handler(call)

        return answer

    def _build_reply(self, status: int, operation: str, body: Value | None) -> HttpReply:
        """Build the reply to a call that has begun an operation."""
        subscription = self._account.scenario().subscription
        path = f"/subscriptions/{subscription}/providers/Microsoft.Compute/locations/-"
        address = f"{self._url}{path}/operations/{operation}?api-version=2024-07-01"
        return HttpReply(
            status=status,
            body=msgspec.json.encode(body) if body is not None else b"",
            headers=(
                ("Content-Type", "application/json"),
                ("Azure-AsyncOperation", address),
                ("Location", address),
                ("Retry-After", "0"),
            ),
        )

    def _issue_token(self, call: ApiCall[NoBody]) -> TokenDocument:
        if call.headers.get("X-IDENTITY-HEADER") != self.secret:
            raise self.errors.unauthorized
        token = secrets.token_urlsafe(24)
        self._tokens.add(token)
        expires = str(int(time.time()) + TOKEN_S)
        return TokenDocument(
            access_token=token, expires_on=expires, resource=call.query.get("resource", "")
        )

    def _tell_address(self, call: ApiCall[NoBody]) -> HttpReply:
        return HttpReply(status=200, body=f"{self._caller()}\n".encode())

    def _list_prices(self, call: ApiCall[NoBody]) -> PricePage:
        condition = call.query.get("$filter", "")
        url = f"{self._url}/prices?$filter={quote(condition)}"
        skip = int(call.query.get("$skip", "0"))
        return build_page(self._account.scenario(), condition, skip, url)

    def _get_subscription(self, call: ApiCall[NoBody]) -> SubscriptionDocument:
        scenario = self._account.scenario()
        state = "Enabled" if scenario.balance_usd > 0 else "Disabled"
        return SubscriptionDocument(subscription_id=scenario.subscription, state=state)

    def _get_provider(self, call: ApiCall[NoBody]) -> ProviderDocument:
        state = "Registered" if self._account.scenario().registered else "NotRegistered"
        return ProviderDocument(namespace=call.path["namespace"], registration_state=state)

    def _list_roles(self, call: ApiCall[NoBody]) -> ArmListing:
        if call.path["group"] not in self._account.groups:
            raise ApiError(404, "ResourceGroupNotFound", "Resource group could not be found.")
        role = {"actions": ["*"], "notActions": list(self._account.scenario().lacking)}
        return ArmListing(value=(role,))

    def _get_operation(self, call: ApiCall[NoBody]) -> OperationState:
        return self._account.read_operation(call.path["operation"])

    def _usages(self, call: ApiCall[NoBody]) -> ArmListing:
        region = call.path["region"]
        usage = self._account.measure_usage(region)
        return ArmListing(
            value=tuple(
                {
                    "unit": "Count",
                    "currentValue": int(usage[name]),
                    "limit": int(self._account.get_limit(name, region)),
                    "name": {"value": name, "localizedValue": name},
                }
                for name in (SPOT_QUOTA, ALL_QUOTA, *FAMILIES)
            )
        )

    def _skus(self, call: ApiCall[NoBody]) -> ArmListing:
        """List the sizes of the region that the filter names."""
        region = call.query.get("$filter", "").partition("'")[2].rstrip("'")
        return ArmListing(
            value=tuple(
                {
                    "resourceType": "virtualMachines",
                    "name": size.name,
                    # It is not always spelled like the name of the quota.
                    "family": size.family.replace(" ", "").replace("Standard", "standard"),
                    "locations": [region],
                    "restrictions": self._list_restrictions(size.name),
                }
                for size in SIZE_LIST
            )
        )

    def _list_restrictions(self, size: str) -> list[Properties]:
        if not self._account.is_closed(size):
            return []
        return [{"type": "Location", "reasonCode": "NotAvailableForSubscription", "values": []}]
