"""Google's own description of the Compute Engine API, as JSON schemas.

It is a file of the package google-api-python-client, a development dependency. Google's discovery
documents describe types in an older dialect, which is turned into JSON Schema here. Requests are
held to it strictly: a field that the description lacks is a mistake of the client.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib import util
from pathlib import Path
from typing import Any

import msgspec
from jsonschema import Draft202012Validator
from referencing import Registry
from referencing.jsonschema import DRAFT202012
from werkzeug.exceptions import HTTPException
from werkzeug.routing import Map, Rule

from labctl.decoding import decode_json
from labctl.model import Value
from labctl.rehearsal.core.validation import MOST_PROBLEMS, ApiRequest

DOCUMENT = "discovery_cache/documents/compute.v1.json"
PREFIX = "/compute/v1/"
URI = "urn:labctl:compute"
# Parameters that every method accepts, which the document lists for all of them together.
COMMON = frozenset({"alt", "$alt", "fields", "key", "prettyPrint", "quotaUser", "userIp"})
# JSON has no 64-bit integers: Google writes them as text.
AS_TEXT = frozenset({"int64", "uint64"})

Schema = dict[str, object]


class TypeDescription(Value, frozen=True, rename="camel"):
    """A type of the document, or a reference to one of its `schemas`."""

    ref: str = msgspec.field(default="", name="$ref")
    type: str = "any"
    format: str = ""
    enum: tuple[str, ...] = ()
    pattern: str = ""
    items: TypeDescription | None = None
    properties: dict[str, TypeDescription] = msgspec.field(default_factory=dict)
    additional_properties: TypeDescription | None = None


class ParameterDescription(TypeDescription, frozen=True, rename="camel"):
    location: str = "query"
    required: bool = False


class MethodDescription(Value, frozen=True, rename="camel"):
    id: str
    path: str
    http_method: str
    parameters: dict[str, ParameterDescription] = msgspec.field(default_factory=dict)
    request: TypeDescription | None = None
    response: TypeDescription | None = None


class ResourceDescription(Value, frozen=True, rename="camel"):
    methods: dict[str, MethodDescription] = msgspec.field(default_factory=dict)
    resources: dict[str, ResourceDescription] = msgspec.field(default_factory=dict)


class DiscoveryDocument(Value, frozen=True, rename="camel"):
    resources: dict[str, ResourceDescription]
    schemas: dict[str, TypeDescription]


def find_document() -> Path | None:
    """Return the file with Google's description; None if its package is not installed."""
    spec = util.find_spec("googleapiclient")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / DOCUMENT
        if path.is_file():
            return path
    return None


class DiscoveryValidator:
    """Checks requests and replies against a discovery document.

    Of its 1,200 methods only those in `names`, such as compute.instances.insert, are read.
    """

    def __init__(self, document: DiscoveryDocument, names: Collection[str]) -> None:
        listed = _list_methods(document.resources)
        self._methods = {method.id: method for method in listed if method.id in names}
        schemas = _convert_needed(document.schemas, self._methods.values())
        resource = DRAFT202012.create_resource({"$defs": schemas})
        self._registry: Registry[Any] = Registry().with_resource(URI, resource)
        rules = [_make_rule(method) for method in self._methods.values()]
        self._rules = Map(rules, strict_slashes=False)

    @classmethod
    def load(cls, path: Path, names: Collection[str]) -> DiscoveryValidator:
        return cls(decode_json(path.read_bytes(), DiscoveryDocument), names)

    def check_request(self, request: ApiRequest) -> tuple[str, ...]:
        if not request.path.startswith(PREFIX):
            return ()  # another API
        found = self._find(request)
        where = f"{request.method} {request.path}"
        if found is None:
            return (f"{where} is not in the description",)
        method, path_values = found
        problems = list(_check_parameters(method, request, path_values))
        if method.request is not None:
            problems += self._check_body(method.request, request.body or b"{}")
        elif request.body and request.body != b"{}":
            problems.append("a body, but none is described")
        return tuple(f"{where}: {problem}" for problem in problems)

    def check_reply(self, request: ApiRequest, status: int, body: bytes) -> tuple[str, ...]:
        found = self._find(request) if request.path.startswith(PREFIX) else None
        if found is None or status >= 400 or found[0].response is None:
            return ()
        problems = self._check_body(found[0].response, body)
        return tuple(f"{request.path}: reply: {problem}" for problem in problems)

    def _find(self, request: ApiRequest) -> tuple[MethodDescription, Mapping[str, str]] | None:
        try:
            name, values = self._rules.bind("").match(request.path, method=request.method)
        except HTTPException:
            return None
        return self._methods[name], values

    def _check_body(self, reference: TypeDescription, body: bytes) -> list[str]:
        try:
            value = msgspec.json.decode(body)
        except msgspec.MsgspecError as error:
            return [f"the body is not JSON: {error}"]
        found = Draft202012Validator(_convert(reference), registry=self._registry)
        errors = sorted(found.iter_errors(value), key=lambda error: list(map(str, error.path)))
        return [f"{error.json_path}: {error.message[:300]}" for error in errors[:MOST_PROBLEMS]]


def _check_parameters(
    method: MethodDescription, request: ApiRequest, path_values: Mapping[str, str]
) -> Iterator[str]:
    known = {name for name, one in method.parameters.items() if one.location == "query"}
    for name in request.query:
        if name not in COMMON and name not in known:
            yield f"unknown query parameter {name}"
    for name, parameter in method.parameters.items():
        texts = request.query.get(name, ())
        if parameter.location == "path":
            texts = (path_values.get(name, ""),)
        if not texts and parameter.required:
            yield f"parameter {name} is missing"
        for text in texts:
            value = text if parameter.type == "string" else _parse(text)
            for error in Draft202012Validator(_convert(parameter)).iter_errors(value):
                yield f"parameter {name}: {error.message[:300]}"


def _parse(text: str) -> object:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _list_methods(resources: Mapping[str, ResourceDescription]) -> Iterator[MethodDescription]:
    for resource in resources.values():
        yield from resource.methods.values()
        yield from _list_methods(resource.resources)


def _convert_needed(
    schemas: Mapping[str, TypeDescription], methods: Iterable[MethodDescription]
) -> dict[str, Schema]:
    """Convert the types of these methods, and all types that they refer to."""
    waiting = [
        name
        for method in methods
        for part in (method.request, method.response)
        if part
        for name in _list_references(part)
    ]
    converted: dict[str, Schema] = {}
    while waiting:
        name = waiting.pop()
        if name not in converted:
            converted[name] = _convert(schemas[name])
            waiting += _list_references(schemas[name])
    return converted


def _list_references(described: TypeDescription) -> Iterator[str]:
    if described.ref:
        yield described.ref
    for part in (*described.properties.values(), described.items, described.additional_properties):
        if part is not None:
            yield from _list_references(part)


def _convert(described: TypeDescription) -> Schema:
    """Turn a type of the discovery document into a JSON schema without unknown fields."""
    if described.ref:
        return {"$ref": f"{URI}#/$defs/{described.ref}"}
    if described.type == "any":
        return {}
    if described.type == "array":
        return {"type": "array", "items": _convert(described.items) if described.items else {}}
    if described.type == "object":
        more = described.additional_properties
        return {
            "type": "object",
            "properties": {name: _convert(part) for name, part in described.properties.items()},
            "additionalProperties": _convert(more) if more else False,
        }
    converted: Schema = {"type": described.type}
    if described.type == "string" and described.format in AS_TEXT:
        # Google accepts numbers as well.
        converted = {"type": ["string", "integer"]}
    if described.enum and described.type == "string":
        converted["enum"] = list(described.enum)
    if described.pattern:
        converted["pattern"] = f"^(?:{described.pattern})$"
    return converted


def _make_rule(method: MethodDescription) -> Rule:
    """Turn `projects/{project}/zones/{zone}` into werkzeug's `projects/<project>/zones/<zone>`."""
    path = method.path.replace("{+", "{").replace("{", "<").replace("}", ">")
    return Rule(PREFIX + path, endpoint=method.id, methods=[method.http_method])
