"""Checks of requests and replies against a cloud's official description of its API.

A cloud without a published description has no validator, and its page says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec
import yaml
from jsonschema import Draft202012Validator
from referencing import Registry
from referencing.jsonschema import DRAFT202012
from werkzeug.exceptions import HTTPException
from werkzeug.routing import Map, Rule

from labctl.model import Value

URI = "urn:labctl:api"
MOST_PROBLEMS = 5
# A part of a description, which has the types of JSON.
Part = Any


class ApiRequest(Value, frozen=True):
    """A request as it came. `path` is without the query, whose parameters may be repeated."""

    method: str
    path: str
    query: Mapping[str, tuple[str, ...]] = {}
    body: bytes = b""


class Validator(Protocol):
    """An official description. Both methods return what is wrong, in words; () if nothing is."""

    def check_request(self, request: ApiRequest) -> tuple[str, ...]: ...

    def check_reply(self, request: ApiRequest, status: int, body: bytes) -> tuple[str, ...]: ...


class OpenApiValidator:
    """A description in OpenAPI 3.1, or a 3.0 one that uses nothing that 3.1 changed.

    Unlike JSON Schema, it reports parameters and top-level fields that the description lacks: a
    misspelled name is a mistake of the client. `prefix` is the path of the description's server.
    """

    def __init__(self, document: Part, prefix: str = "") -> None:
        self._document = document
        resource = DRAFT202012.create_resource(document)
        self._registry: Registry[Any] = Registry().with_resource(URI, resource)
        self._rules = Map(
            [
                Rule(prefix + _as_rule(path), endpoint=(path, method), methods=[method.upper()])
                for path, item in document["paths"].items()
                for method in item
                if method in ("get", "post", "put", "patch", "delete")
            ],
            strict_slashes=False,
        )

    @classmethod
    def load(cls, path: Path, prefix: str = "") -> OpenApiValidator:
        """Load a description in JSON or YAML."""
        text = path.read_text()
        is_json = path.suffix == ".json"
        return cls(json.loads(text) if is_json else yaml.safe_load(text), prefix)

    def check_request(self, request: ApiRequest) -> tuple[str, ...]:
        match = self._match(request)
        if match is None:
            return (f"{request.method} {request.path} is not in the description",)
        pointer, operation, path_values = match
        problems = [*self._check_parameters(operation, request, path_values)]
        body = self._resolve(operation.get("requestBody", {}))
        where = f"{pointer}/requestBody"
        if "$ref" in operation.get("requestBody", {}):
            where = operation["requestBody"]["$ref"].removeprefix("#")
        problems += self._check_body(body, where, request.body)
        return tuple(f"{request.method} {request.path}: {problem}" for problem in problems)

    def check_reply(self, request: ApiRequest, status: int, body: bytes) -> tuple[str, ...]:
        match = self._match(request)
        if match is None:
            return ()
        pointer, operation, _ = match
        responses = operation["responses"]
        name = next((n for n in (str(status), "default") if n in responses), None)
        where = f"{request.method} {request.path}"
        if name is None:
            return (f"{where}: no reply with status {status} is described",)
        pointer = f"{pointer}/responses/{name}"
        if "$ref" in responses[name]:
            pointer = responses[name]["$ref"].removeprefix("#")
        problems = self._check_body(self._resolve(responses[name]), pointer, body, is_reply=True)
        return tuple(f"{where}: reply {status}: {problem}" for problem in problems)

    def _match(self, request: ApiRequest) -> tuple[str, Any, Part] | None:
        """Return the operation's place in the document, the operation, and its path parameters."""
        try:
            (path, method), values = self._rules.bind("").match(request.path, method=request.method)
        except HTTPException:
            return None
        item = self._document["paths"][path]
        operation = dict(item[method])
        operation["parameters"] = [*item.get("parameters", ()), *operation.get("parameters", ())]
        escaped = path.replace("~", "~0").replace("/", "~1")
        return f"/paths/{escaped}/{method}", operation, values

    def _resolve(self, node: Part) -> Part:
        """Return what a reference refers to, or the node itself."""
        for _ in range(8):
            if "$ref" not in node:
                break
            target: Any = self._document
            for part in node["$ref"].removeprefix("#/").split("/"):
                target = target[part.replace("~1", "/").replace("~0", "~")]
            node = target
        return node

    def _check_parameters(
        self, operation: Part, request: ApiRequest, path_values: Part
    ) -> Iterator[str]:
        parameters = [self._resolve(parameter) for parameter in operation["parameters"]]
        known = {(p["in"], p["name"]) for p in parameters}
        yield from (
            f"unknown query parameter {name}"
            for name in request.query
            if ("query", name) not in known
        )
        for parameter in parameters:
            name, schema = parameter["name"], parameter.get("schema", {})
            if parameter["in"] == "path":
                texts: tuple[str, ...] = (str(path_values[_as_name(name)]),)
            elif parameter["in"] == "query":
                texts = request.query.get(name, ())
            else:
                continue
            if not texts and parameter.get("required"):
                yield f"query parameter {name} is missing"
            elif texts:
                value = _parse_parameter(self._resolve(schema), texts)
                for problem in self._list_errors(schema, value):
                    yield f"parameter {name}: {problem}"

    def _check_body(
        self, described: Part, pointer: str, body: bytes, *, is_reply: bool = False
    ) -> list[str]:
        content = described.get("content", {})
        kind = next((kind for kind in content if "json" in kind), None)
        if kind is None:
            return ["a body, but none is described"] if body and not content else []
        if not body:
            return ["the body is missing"] if is_reply or described.get("required") else []
        try:
            value = msgspec.json.decode(body)
        except msgspec.MsgspecError as error:
            return [f"the body is not JSON: {error}"]
        schema = {"$ref": f"{URI}#{pointer}/content/{kind.replace('/', '~1')}/schema"}
        if not is_reply:
            return self._list_errors({**schema, "unevaluatedProperties": False}, value)
        return self._list_errors(schema, value)

    def _list_errors(self, schema: Part, value: object) -> list[str]:
        validator = Draft202012Validator(_with_whole_references(schema), registry=self._registry)
        errors = sorted(validator.iter_errors(value), key=lambda error: list(map(str, error.path)))
        return [f"{error.json_path}: {error.message[:300]}" for error in errors[:MOST_PROBLEMS]]


def _with_whole_references(node: Part) -> Part:
    """Return a part of the document that can be read outside of it."""
    if isinstance(node, list):
        return [_with_whole_references(item) for item in node]
    if not isinstance(node, dict):
        return node
    parts = {key: _with_whole_references(value) for key, value in node.items()}
    reference = parts.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        parts["$ref"] = URI + reference
    return parts


def _as_rule(path: str) -> str:
    """Turn `/v2/pods/{id}` into werkzeug's `/v2/pods/<id>`."""
    parts = path.split("/")
    return "/".join(f"<{_as_name(p[1:-1])}>" if p.startswith("{") else p for p in parts)


def _as_name(name: str) -> str:
    return name.replace("-", "_")


def _parse_parameter(schema: Part, texts: tuple[str, ...]) -> object:
    """Turn a parameter's text into the value that its schema describes."""
    kinds = schema.get("type", "string")
    kind = kinds if isinstance(kinds, str) else next(k for k in kinds if k != "null")
    if kind == "array":
        parts = texts if len(texts) > 1 else tuple(texts[0].split(","))
        return [_parse_parameter(schema.get("items", {}), (part,)) for part in parts]
    if kind in ("integer", "number", "boolean", "object"):
        try:
            return json.loads(texts[0])
        except ValueError:
            return texts[0]
    return texts[0]
