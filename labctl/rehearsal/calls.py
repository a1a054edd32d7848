"""One call of an AWS API as it came over HTTP, and the answers of ours.

EC2 speaks its query protocol (a form, XML back); the others here speak JSON, named by a header,
or REST with JSON (EventBridge Scheduler).
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable
from functools import cached_property
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlencode
from xml.etree import ElementTree

from labctl.model import Value

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

Environ = dict[str, Any]


class Reply(Value, frozen=True):
    """An answer over HTTP. Status 0 is none: the connection closes, after `hold_s` at most."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    hold_s: float = 0.0


class Call:
    """One request. `service` is its signing name, such as ec2; `action` AWS's name for the call."""

    def __init__(self, environ: Environ) -> None:
        self.environ = environ
        length = int(environ.get("CONTENT_LENGTH") or 0)
        self.body: bytes = environ["wsgi.input"].read(length) if length else b""
        scope = _SCOPE.search(environ.get("HTTP_AUTHORIZATION", ""))
        self.key, self.region, self.service = scope.groups() if scope else ("", "", "")
        self.action = self._action()

    @cached_property
    def form(self) -> dict[str, str]:
        """The fields of a query call; {} for the others."""
        return dict(parse_qsl(self.body.decode(errors="replace"), keep_blank_values=True))

    @cached_property
    def json(self) -> dict[str, Any]:
        """The body of a JSON call; {} where it is none."""
        try:
            said = json.loads(self.body or b"{}")
        except ValueError:
            return {}
        return said if isinstance(said, dict) else {}

    @property
    def name(self) -> str:
        return f"{self.service}:{self.action}"

    @property
    def dry(self) -> bool:
        return self.form.get("DryRun", "").lower() == "true"

    def many(self, prefix: str) -> list[str]:
        """The values of a numbered field: InstanceId.1, InstanceId.2, ..."""
        found: list[str] = []
        while (value := self.form.get(f"{prefix}.{len(found) + 1}")) is not None:
            found.append(value)
        return found

    def filters(self) -> dict[str, list[str]]:
        """EC2's filters by their name."""
        found: dict[str, list[str]] = {}
        number = 1
        while (name := self.form.get(f"Filter.{number}.Name")) is not None:
            found[name] = self.many(f"Filter.{number}.Value")
            number += 1
        return found

    def wsgi(self) -> Environ:
        """The environment to hand on, with the whole body to read again."""
        return {
            **self.environ,
            "wsgi.input": io.BytesIO(self.body),
            "CONTENT_LENGTH": str(len(self.body)),
        }

    def with_form(self, fields: dict[str, str]) -> Call:
        """The same call with another form."""
        body = urlencode(fields).encode()
        environ = {
            **self.environ,
            "wsgi.input": io.BytesIO(body),
            "CONTENT_LENGTH": str(len(body)),
        }
        return Call(environ)

    def _action(self) -> str:
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
            found = [name for key, name in S3_QUERIES.items() if key in query]
            return found[0] if found else S3_METHODS.get(self.environ["REQUEST_METHOD"], "")
        return next(iter(query.get("Action", [])), str(self.environ["REQUEST_METHOD"]))


def element(name: str, content: str | Iterable[ElementTree.Element] = "") -> ElementTree.Element:
    """An XML element with text or with children."""
    made = ElementTree.Element(name)
    if isinstance(content, str):
        made.text = content
    else:
        made.extend(content)
    return made


def ec2_reply(action: str, children: Iterable[ElementTree.Element]) -> Reply:
    """EC2's answer to this action."""
    root = element(f"{action}Response", [element("requestId", REQUEST_ID), *children])
    root.set("xmlns", EC2_NAMESPACE)
    return xml_reply(root)


def xml_reply(root: ElementTree.Element, status: int = 200) -> Reply:
    body = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return Reply(status=status, body=body, headers=(("Content-Type", "text/xml"),))


def json_reply(content: Any, status: int = 200) -> Reply:
    headers = (("Content-Type", "application/x-amz-json-1.1"),)
    return Reply(status=status, body=json.dumps(content).encode(), headers=headers)


def refusal(call: Call, code: str, message: str, status: int = 400) -> Reply:
    """An error as this call's service tells it."""
    if call.service == "ec2":
        error = element("Error", [element("Code", code), element("Message", message)])
        parts = [element("Errors", [error]), element("RequestID", REQUEST_ID)]
        return xml_reply(element("Response", parts), status)
    if call.service == "s3":
        words = [element("Code", code), element("Message", message)]
        return xml_reply(element("Error", words), status)
    if call.service in ("sts", "iam"):
        words = [element("Type", "Sender"), element("Code", code), element("Message", message)]
        parts = [element("Error", words), element("RequestId", REQUEST_ID)]
        return xml_reply(element("ErrorResponse", parts), status)
    headers = (("Content-Type", "application/json"), ("x-amzn-errortype", code))
    body = json.dumps({"__type": code, "message": message}).encode()
    return Reply(status=status, body=body, headers=headers)


def parsed(reply: Reply) -> ElementTree.Element:
    """The root of an XML answer of moto, names without their namespace."""
    root = ElementTree.fromstring(reply.body)
    for node in root.iter():
        node.tag = node.tag.rpartition("}")[2]
    return root
