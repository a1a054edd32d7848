"""EC2 as moto plays it, over HTTP on loopback, with other answers where a test says so."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs

import pytest
from botocore.loaders import create_loader
from moto import settings
from moto.backends import get_backend
from moto.ec2.models import amis
from moto.ec2.models import instance_types as catalog
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

Start = Callable[..., Any]
REGION = "us-east-1"
CANONICAL = "099720109477"
# A type of each kind that labctl tells apart. moto has 1,400, and takes long to list them.
NAMES = (
    *("g4dn.xlarge", "g4dn.12xlarge", "g5.xlarge", "g5g.xlarge", "g6f.large", "p5.48xlarge"),
    *("t3.micro", "c7g.xlarge", "m7i-flex.large"),
)
TYPES = [one for one in catalog.InstanceTypeBackend.instance_types if one["InstanceType"] in NAMES]
OFFERINGS = {
    region: [one for one in offered if one["InstanceType"] in NAMES]
    for region, offered in catalog.INSTANCE_TYPE_OFFERINGS["availability-zone"].items()
}
LOADER = create_loader()
XML_ERROR = (
    "<?xml version='1.0' encoding='UTF-8'?><Response><Errors><Error><Code>{code}</Code>"
    "<Message>{message}</Message></Error></Errors><RequestID>1</RequestID></Response>"
)

NONE = "<DescribePlacementGroupsResponse><placementGroupSet/></DescribePlacementGroupsResponse>"


class Cloud:
    """`refuse` and `reply` hold for the next call of that name (EC2's Action, JSON's target)."""

    def __init__(self) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._refusals: dict[str, deque[tuple[int, str, bool]]] = {}
        self._replies: dict[str, Any] = {}
        self._never: dict[str, str] = {}
        # moto is not made for several threads at once.
        self._one = threading.Lock()
        self.seen: Counter[str] = Counter()
        self.bodies: list[dict[str, str]] = []
        self.url = ""

    def refuse(
        self, name: str, code: str, message: str = "no", *, status: int = 400, applied: bool = False
    ) -> None:
        """`applied`: the call is carried out, and its answer lost behind this one."""
        text = XML_ERROR.format(code=code, message=message)
        self._refusals.setdefault(name, deque()).append((status, text, applied))

    def never(self, name: str, code: str) -> None:
        """Every call of this name is refused."""
        self._never[name] = XML_ERROR.format(code=code, message="not here")

    def reply(self, name: str, value: Any) -> None:
        """A JSON service's answer to every call of this name; a callable gets the request."""
        self._replies[name] = value

    def __call__(self, environ: dict[str, Any], start: Start) -> Any:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        name, asked = self._name(environ, body)
        self.seen[name] += 1
        if name in self._replies:
            return self._replied(self._replies[name], json.loads(body or b"{}"), start)
        if name in self._never:
            start("400 Refused", [("Content-Type", "text/xml")])
            return [self._never[name].encode()]
        if waiting := self._refusals.get(name):
            status, text, applied = waiting.popleft()
            if applied:
                with self._one:
                    b"".join(self._moto(environ, lambda *_: None))
            start(f"{status} Refused", [("Content-Type", "text/xml")])
            return [text.encode()]
        if "PlacementGroup" in name:
            # moto has none; the rehearsal's are tested with it.
            is_dry = asked.get("DryRun") == "true"
            text = XML_ERROR.format(code="DryRunOperation", message="would do") if is_dry else NONE
            start("412 Dry" if is_dry else "200 OK", [("Content-Type", "text/xml")])
            return [text.encode()]
        self.bodies.append(asked)
        with self._one:
            return list(self._moto(environ, start))

    def _name(self, environ: dict[str, Any], body: bytes) -> tuple[str, dict[str, str]]:
        if target := environ.get("HTTP_X_AMZ_TARGET", ""):
            return target.partition(".")[2], {}
        form = {key: values[0] for key, values in parse_qs(body.decode("latin-1")).items()}
        return form.get("Action", environ["PATH_INFO"]), form

    def _replied(self, value: Any, request: dict[str, Any], start: Start) -> list[bytes]:
        made = value(request) if callable(value) else value
        status = 400 if isinstance(made, dict) and "__type" in made else 200
        start(f"{status} OK", [("Content-Type", "application/x-amz-json-1.1")])
        return [json.dumps(made).encode()]


def forget_rehearsals(monkeypatch: pytest.MonkeyPatch) -> None:
    """moto as it comes: a rehearsal in the same process, over or not, switched it for itself.

    One image for all of its thousand, and a few types, since it takes long to list them.
    """
    images = [image for image in amis.AMIS if image["owner_id"] == CANONICAL]
    monkeypatch.setattr(amis, "AMIS", images[:1])
    monkeypatch.setattr(catalog.InstanceTypeBackend, "instance_types", TYPES)
    monkeypatch.setitem(catalog.INSTANCE_TYPE_OFFERINGS, "availability-zone", OFFERINGS)
    monkeypatch.setenv("MOTO_AMIS_PATH", "nothing besides these")
    monkeypatch.setattr(settings, "ec2_load_default_amis", lambda: True)
    for name in ("ENABLE_AMI", "ENABLE_KEYPAIR", "EC2_ENABLE_INSTANCE_TYPE"):
        monkeypatch.setattr(settings, f"{name}_VALIDATION", False)
    for service in ("ec2", "scheduler", "sts"):
        get_backend(service).reset()


def share_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """botocore reads what it knows of EC2 once, and not for each session; that takes it long."""
    monkeypatch.setattr("botocore.session.create_loader", lambda search_path_string: LOADER)


@contextmanager
def running() -> Iterator[Cloud]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    cloud = Cloud()
    server = make_server("127.0.0.1", 0, cloud, threaded=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    cloud.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield cloud
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
