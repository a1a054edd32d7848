"""A call of an AWS API over HTTP, and our responses.

EC2 uses its query protocol (a form, and XML in response); the others use JSON, with the action in a
header, or REST with JSON (EventBridge Scheduler).
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable
from functools import cached_property
from typing import TypeVar
from urllib.parse import parse_qs, parse_qsl, urlencode
from wsgiref.types import WSGIEnvironment
from xml.etree import ElementTree

import msgspec

from labctl.decoding import decode_json
from labctl.model import Value
from labctl.rehearsal.core.replies import HttpReply

EC2_NAMESPACE = "http://ec2.amazonaws.com/doc/2016-11-15/"
REQUEST_ID = "00000000-0000-4000-8000-000000000000"
REST_ACTIONS = {
    ("scheduler", "POST", "schedules"): "CreateSchedule",
    ("scheduler", "PUT", "schedules"): "UpdateSchedule",
    ("scheduler", "DELETE", "schedules"): "DeleteSchedule",
}
S3_QUERIES = {
    "list-type": "ListObjectsV2",
    "uploads": "CreateMultipartUpload",
    "partNumber": "UploadPart",
    "uploadId": "CompleteMultipartUpload",
    "delete": "DeleteObjects",
}
S3_METHODS = {
    "PUT": "PutObject",
    "GET": "GetObject",
    "HEAD": "HeadObject",
    "DELETE": "DeleteObject",
}
_SCOPE = re.compile(r"Credential=([^/,]+)/[0-9]{8}/([a-z0-9-]+)/([a-z0-9-]+)/aws4_request")

Body = TypeVar("Body", bound=Value)


class Call:
    """A request. `service` is its signing name, such as ec2; `action` is AWS's name of the call."""

    def __init__(self, environ: WSGIEnvironment) -> None:
        self.environ = environ
        length = int(environ.get("CONTENT_LENGTH") or 0)
        self.body: bytes = environ["wsgi.input"].read(length) if length else b""
        scope = _SCOPE.search(environ.get("HTTP_AUTHORIZATION", ""))
        self.key, self.region, self.service = scope.groups() if scope else ("", "", "")
        self.action = self._parse_action()

    @cached_property
    def form(self) -> dict[str, str]:
        """The fields of a query call; {} for other calls."""
        return dict(parse_qsl(self.body.decode(errors="replace"), keep_blank_values=True))

    def parse_json(self, kind: type[Body]) -> Body:
        """Parse the body of a JSON call; a body of another form gives the defaults."""
        try:
            return decode_json(self.body or b"{}", kind)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return kind()

    @property
    def name(self) -> str:
        return f"{self.service}:{self.action}"

    @property
    def dry(self) -> bool:
        return self.form.get("DryRun", "").lower() == "true"

    def read_numbered(self, prefix: str) -> list[str]:
        """Return the values of a numbered field: InstanceId.1, InstanceId.2, ..."""
        values: list[str] = []
        while (value := self.form.get(f"{prefix}.{len(values) + 1}")) is not None:
            values.append(value)
        return values

    def read_filters(self) -> dict[str, list[str]]:
        """Return EC2's filters by name."""
        filters_by_name: dict[str, list[str]] = {}
        number = 1
        while (name := self.form.get(f"Filter.{number}.Name")) is not None:
            filters_by_name[name] = self.read_numbered(f"Filter.{number}.Value")
            number += 1
        return filters_by_name

    def build_environ(self) -> WSGIEnvironment:
        """Return the environment to pass on, with a body that can be read again."""
        return {
            **self.environ,
            "wsgi.input": io.BytesIO(self.body),
            "CONTENT_LENGTH": str(len(self.body)),
        }

    def with_form(self, fields: dict[str, str]) -> Call:
        """Return the same call with another form."""
        body = urlencode(fields).encode()
        environ = {
            **self.environ,
            "wsgi.input": io.BytesIO(body),
            "CONTENT_LENGTH": str(len(body)),
        }
        return Call(environ)

    def _parse_action(self) -> str:
        if target := self.environ.get("HTTP_X_AMZ_TARGET", ""):
            return str(target).rpartition(".")[2]
        if self.service in ("ec2", "sts", "iam"):
            return self.form.get("Action", "")
        if self.service == "scheduler":
            method = self.environ["REQUEST_METHOD"]
            top = self.environ["PATH_INFO"].strip("/").split("/")[0]
            named = self.environ["PATH_INFO"].strip("/").count("/") > 0
            read = "GetSchedule" if named else "ListSchedules"
            return REST_ACTIONS.get((self.service, str(method), str(top)), read)
        query = parse_qs(self.environ.get("QUERY_STRING", ""), keep_blank_values=True)
        if self.service == "s3":
            actions = [name for key, name in S3_QUERIES.items() if key in query]
            return actions[0] if actions else S3_METHODS.get(self.environ["REQUEST_METHOD"], "")
        return next(iter(query.get("Action", [])), str(self.environ["REQUEST_METHOD"]))


def build_element(
    name: str, content: str | Iterable[ElementTree.Element] = ""
) -> ElementTree.Element:
    """Build an XML element with text or with children."""
    node = ElementTree.Element(name)
    if isinstance(content, str):
        node.text = content
    else:
        node.extend(content)
    return node


def build_ec2_reply(action: str, children: Iterable[ElementTree.Element]) -> HttpReply:
    """Build EC2's response to this action."""
    root = build_element(f"{action}Response", [build_element("requestId", REQUEST_ID), *children])
    root.set("xmlns", EC2_NAMESPACE)
    return build_xml_reply(root)


def build_xml_reply(root: ElementTree.Element, status: int = 200) -> HttpReply:
    body = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return HttpReply(status=status, body=body, headers=(("Content-Type", "text/xml"),))


def build_json_reply(content: Value, status: int = 200) -> HttpReply:
    headers = (("Content-Type", "application/x-amz-json-1.1"),)
    return HttpReply(status=status, body=msgspec.json.encode(content), headers=headers)


def build_refusal(call: Call, code: str, message: str, status: int = 400) -> HttpReply:
    """Build an error response in the format of this call's service."""
    if call.service == "ec2":
        error = build_element(
            "Error", [build_element("Code", code), build_element("Message", message)]
        )
        parts = [build_element("Errors", [error]), build_element("RequestID", REQUEST_ID)]
        return build_xml_reply(build_element("Response", parts), status)
    if call.service == "s3":
        words = [build_element("Code", code), build_element("Message", message)]
        return build_xml_reply(build_element("Error", words), status)
    if call.service in ("sts", "iam"):
        words = [
            build_element("Type", "Sender"),
            build_element("Code", code),
            build_element("Message", message),
        ]
        parts = [build_element("Error", words), build_element("RequestId", REQUEST_ID)]
        return build_xml_reply(build_element("ErrorResponse", parts), status)
    headers = (("Content-Type", "application/json"), ("x-amzn-errortype", code))
    body = json.dumps({"__type": code, "message": message}).encode()
    return HttpReply(status=status, body=body, headers=headers)


def parse_reply(reply: HttpReply) -> ElementTree.Element:
    """Parse an XML response of moto; return the root, names without their namespace."""
    root = ElementTree.fromstring(reply.body)
    for node in root.iter():
        node.tag = node.tag.rpartition("}")[2]
    return root


def parse_tags(call: Call) -> dict[str, dict[str, str]]:
    """Return the tags of a call by kind of resource."""
    tags_by_kind: dict[str, dict[str, str]] = {}
    number = 1
    while (kind := call.form.get(f"TagSpecification.{number}.ResourceType")) is not None:
        tags, index = tags_by_kind.setdefault(kind, {}), 1
        while (key := call.form.get(f"TagSpecification.{number}.Tag.{index}.Key")) is not None:
            tags[key] = call.form.get(f"TagSpecification.{number}.Tag.{index}.Value", "")
            index += 1
        number += 1
    return tags_by_kind
