"""The API of the simulated Google Cloud: its calls, its errors, and who may make them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
from werkzeug.datastructures import Headers
from werkzeug.http import http_date

from labctl.model import Value
from labctl.rehearsal.core.operations import (
    ApiCall,
    ApiError,
    ErrorReplies,
    NoBody,
    Operation,
    Result,
)
from labctl.rehearsal.core.replies import HttpReply
from labctl.rehearsal.core.validation import Validator
from labctl.rehearsal.gcp.identity import ServiceAccount, TokenReply
from labctl.rehearsal.gcp.machines import MachineHandlers
from labctl.rehearsal.gcp.pricelist import VERSION, build_catalog
from labctl.rehearsal.gcp.project import Project
from labctl.rehearsal.gcp.storage import ResourceHandlers

# Calls of other services, which need no credentials.
OPEN = ("token", "checkip", "prices.version", "prices.catalog")


class ErrorReason(Value, frozen=True):
    reason: str
    message: str
    domain: str = "global"


class ErrorBody(Value, frozen=True):
    code: int
    message: str
    errors: tuple[ErrorReason, ...]


class ErrorDocument(Value, frozen=True):
    error: ErrorBody


class PermissionsBody(Value, frozen=True):
    """The permissions that projects.testIamPermissions asks for, or those that are granted."""

    permissions: tuple[str, ...] = ()


class GcpApi:
    """What the application needs to know about Google Cloud."""

    # Google answers 403 to a call beyond a rate (cloud.google.com/compute/docs/api/rate-limits).
    errors = ErrorReplies(
        unauthorized=ApiError(401, "authError", "Invalid Credentials"),
        expired=ApiError(401, "authError", "Invalid Credentials"),
        denied=ApiError(403, "forbidden", "Required permission is missing"),
        throttled=ApiError(403, "rateLimitExceeded", "Rate Limit Exceeded"),
        not_found=ApiError(404, "notFound", "Not Found"),
        invalid=ApiError(400, "invalid", "Invalid value"),
        failed_code="backendError",
    )

    def __init__(
        self,
        project: Project,
        identity: ServiceAccount,
        caller: Callable[[], str],
    ) -> None:
        self.validator: Validator | None = None
        self._started_at = time.time()
        self._project = project
        self._identity = identity
        self._caller = caller
        self._machines = MachineHandlers(project)
        self._resources = ResourceHandlers(project)

    def list_operations(self) -> tuple[Operation[Any], ...]:
        compute = (*self._machines.list_operations(), *self._resources.list_operations())
        return (
            *(replace(one, handler=self._guard_project(one)) for one in compute),
            Operation("token", "POST", "/token", self._issue_token, NoBody),
            Operation(
                "projects.testIamPermissions",
                "POST",
                "/v1/projects/<target>",
                self._test_permissions,
                PermissionsBody,
            ),
            Operation("checkip", "GET", "/checkip", self._tell_address, NoBody),
            Operation("prices.version", "GET", "/prices/gcp/version", _tell_version, NoBody),
            Operation(
                "prices.catalog",
                "GET",
                f"/prices/gcp/{VERSION}/catalog.zip",
                self._send_prices,
                NoBody,
            ),
        )

    def _guard_project(self, operation: Operation[Any]) -> Callable[[ApiCall[Any]], Result]:
        """Refuse calls for other projects; images belong to projects of their makers."""

        def answer(call: ApiCall[Any]) -> Result:
            name = call.path["project"]
            if name != self._project.name and not operation.name.startswith("images."):
                permission = f"compute.{operation.name}"
                text = f"Required '{permission}' permission for 'projects/{name}'"
                raise ApiError(403, "forbidden", text)
            return operation.handler(call)

        return answer

    def check_access(self, name: str, headers: Headers) -> None:
        kind, _, token = headers.get("Authorization", "").partition(" ")
        if name not in OPEN and (kind != "Bearer" or not self._identity.is_valid(token)):
            raise self.errors.unauthorized

    def write_error(self, error: ApiError) -> bytes:
        reason = ErrorReason(reason=error.code, message=error.message)
        body = ErrorBody(code=error.status, message=error.message, errors=(reason,))
        return msgspec.json.encode(ErrorDocument(error=body))

    def write_result(self, result: Value) -> bytes:
        return msgspec.json.encode(result)

    def _issue_token(self, call: ApiCall[NoBody]) -> TokenReply:
        return self._identity.issue_token()

    def _test_permissions(self, call: ApiCall[PermissionsBody]) -> PermissionsBody:
        lacking = self._project.scenario().lacking
        return PermissionsBody(
            permissions=tuple(one for one in call.body.permissions if one not in lacking)
        )

    def _tell_address(self, call: ApiCall[NoBody]) -> HttpReply:
        return HttpReply(status=200, body=f"{self._caller()}\n".encode())

    def _send_prices(self, call: ApiCall[NoBody]) -> HttpReply:
        body = build_catalog(self._project.scenario())
        headers = (
            ("Content-Type", "application/zip"),
            ("Last-Modified", http_date(self._started_at)),
        )
        return HttpReply(status=200, body=body, headers=headers)


def _tell_version(call: ApiCall[NoBody]) -> HttpReply:
    return HttpReply(status=200, body=f"{VERSION}\n".encode())
