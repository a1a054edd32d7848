"""Microsoft's own description of Azure's APIs: the types of its SDK, development dependencies.

The SDK is generated from the specification that Azure publishes. A field that a type lacks is a
mistake of the client, or of this rehearsal, although Azure itself ignores some of them.
"""

from __future__ import annotations

import functools
import re
import types
import typing
from collections.abc import Iterator
from datetime import datetime
from enum import Enum
from importlib import import_module, util
from typing import Any

import msgspec

from labctl.rehearsal.core.validation import MOST_PROBLEMS, ApiRequest

COMPUTE, NETWORK = "azure.mgmt.compute.models", "azure.mgmt.network.models"
RESOURCE = "azure.mgmt.resource.resources.models"
SCHEDULE = "azure.mgmt.computeschedule.models"
PACKAGES = ("azure.mgmt.compute", "azure.mgmt.network", "azure.mgmt.resource.resources")
_GROUP = r"/subscriptions/[^/]+/resourceGroups/[^/]+"
# (method, path, type of the body, type of the reply); a list is checked item by item.
_NAMES = (
    (_GROUP, RESOURCE, "ResourceGroup"),
    (f"{_GROUP}/providers/Microsoft.Compute/virtualMachines", COMPUTE, "VirtualMachine"),
    (f"{_GROUP}/providers/Microsoft.Compute/disks", COMPUTE, "Disk"),
    (f"{_GROUP}/providers/Microsoft.Network/networkInterfaces", NETWORK, "NetworkInterface"),
    (f"{_GROUP}/providers/Microsoft.Network/publicIPAddresses", NETWORK, "PublicIPAddress"),
    (f"{_GROUP}/providers/Microsoft.Network/virtualNetworks", NETWORK, "VirtualNetwork"),
    (
        f"{_GROUP}/providers/Microsoft.Network/networkSecurityGroups",
        NETWORK,
        "NetworkSecurityGroup",
    ),
    (
        f"{_GROUP}/providers/Microsoft.Network/networkSecurityGroups/[^/]+/securityRules",
        NETWORK,
        "SecurityRule",
    ),
    (
        f"{_GROUP}/providers/[^/]+/[^/]+/[^/]+/providers/Microsoft.Resources/tags",
        RESOURCE,
        "TagsResource",
    ),
)
_RESOURCES = tuple(
    (re.compile(path if kind == "ResourceGroup" else f"{path}(/[^/]+)?"), module, kind)
    for path, module, kind in _NAMES
)
UPDATES = {"TagsResource": "TagsPatchResource"}


def has_sdk() -> bool:
    """Whether the packages are installed."""
    try:
        return all(util.find_spec(name) is not None for name in PACKAGES)
    except ModuleNotFoundError:
        return False


class SdkValidator:
    """Checks the bodies of requests and replies against the SDK's types."""

    def check_request(self, request: ApiRequest) -> tuple[str, ...]:
        problems: list[str] = []
        if request.path.startswith("/subscriptions/") and "api-version" not in request.query:
            problems.append("api-version is missing")
        found = _find_type(request)
        if found is not None and request.method in ("PUT", "PATCH"):
            module, kind = found
            name = UPDATES.get(kind, kind) if request.method == "PATCH" else kind
            problems += _check_body(module, name, request.body)
        where = f"{request.method} {request.path}"
        return tuple(f"{where}: {problem}" for problem in problems[:MOST_PROBLEMS])

    def check_reply(self, request: ApiRequest, status: int, body: bytes) -> tuple[str, ...]:
        found = _find_type(request)
        if found is None or status >= 400 or not body:
            return ()
        module, kind = found
        problems = _check_body(module, kind, body)
        return tuple(f"{request.path}: reply: {one}" for one in problems[:MOST_PROBLEMS])


def _find_type(request: ApiRequest) -> tuple[str, str] | None:
    for pattern, module, kind in _RESOURCES:
        if pattern.fullmatch(request.path):
            return module, kind
    return None


def _check_body(module: str, kind: str, body: bytes) -> list[str]:
    try:
        value = msgspec.json.decode(body)
    except msgspec.MsgspecError as error:
        return [f"the body is not JSON: {error}"]
    described = getattr(import_module(module), kind)
    items = value["value"] if set(value) == {"value"} else [value]
    return [problem for item in items for problem in _check(item, described, module, "$")]


def _check(value: Any, hint: Any, module: str, where: str) -> Iterator[str]:
    """Yield what is wrong with a value of JSON for this type."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        options = [part for part in parts if part is not type(None)]
        results = [list(_check(value, option, module, where)) for option in options]
        if value is not None and not any(not problems for problems in results):
            yield from results[0]
    elif origin is list:
        if not isinstance(value, list):
            yield f"{where} is not a list"
            return
        for number, item in enumerate(value):
            yield from _check(item, parts[0], module, f"{where}[{number}]")
    elif origin is dict:
        for name, item in value.items():
            yield from _check(item, parts[1], module, f"{where}.{name}")
    elif isinstance(hint, type):
        yield from _check_class(value, hint, module, where)


def _check_class(value: Any, kind: type, module: str, where: str) -> Iterator[str]:
    if hasattr(kind, "as_dict"):
        if not isinstance(value, dict):
            yield f"{where} is not an object"
            return
        fields = _list_fields(kind, module)
        for name, item in value.items():
            if name not in fields:
                yield f"{where}.{name} is not a field of {kind.__name__}"
            else:
                yield from _check(item, fields[name], module, f"{where}.{name}")
        return
    if issubclass(kind, str | Enum | datetime | bytes):
        accepted: tuple[type, ...] = (str,)
    elif kind is float:
        accepted = (int, float)
    else:
        accepted = (kind,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        yield f"{where} is {type(value).__name__} instead of {kind.__name__}"


@functools.cache
def _list_fields(kind: type, module: str) -> dict[str, object]:
    """Return the types of an SDK class's fields by their names in JSON."""
    kind()  # the SDK finds out about its fields when the first object is created
    names = getattr(kind, "_attr_to_rest_field", {})
    models = import_module(module)
    space = {"_models": models, **vars(typing), **vars(import_module(kind.__module__))}
    hints = typing.get_type_hints(kind, globalns=space)
    return {field._rest_name: hints.get(attribute, Any) for attribute, field in names.items()}
