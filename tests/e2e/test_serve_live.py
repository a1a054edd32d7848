"""A model served on a real engine: added to an image without FastAPI, private, and honest."""

from __future__ import annotations

import base64
import io
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image
from service_lab import HOME, LAB, LAB_ID, ServiceLab
from sshd_container import docker

from labctl.errors import PolicyError
from labctl.services.model_serving import PACKAGES
from labctl.services.port_forward import Forwarding
from labctl.services.services import ensure_service, stop_service
from labctl.wire.services import ServedModel, ServiceRequest

pytest_plugins = ["service_fixtures"]
pytestmark = pytest.mark.engine

RUN = f"{HOME}/{LAB}/runs/night"
PREDICT = """
import os

class Predictor:
    classes = ("dark", "light")
    checkpoint = "step-00000001"

    def predict(self, images):
        light = [one.convert("L").getpixel((0, 0)) / 255 for one in images]
        return [[1 - value, value] for value in light]

def load(checkpoints):
    try:
        open("/lab/code/mine", "w")
    except OSError as error:
        print("read-only:", error.strerror, flush=True)
    return Predictor()
"""
SAFETENSORS = b"\x02" + bytes(7) + b"{}"


def put(lab: ServiceLab, path: str, content: bytes) -> None:
    name = f"{RUN}/{path}"
    lab.box.sh(f"mkdir -p $(dirname {name})", user="student")
    words = ("exec", "-i", "-u", "student", lab.box.name, "sh", "-c", f"base64 -d > {name}")
    docker(*words, stdin=base64.b64encode(content).decode())


def wish(lab: ServiceLab, checkpoint: str = "") -> ServiceRequest:
    return lab.request("serve")._replace(
        model=ServedModel(run="night", checkpoint=checkpoint),
        args={"PACKAGES": PACKAGES},
        replace=True,
    )


@pytest.fixture
def served(service_lab: ServiceLab) -> Iterator[ServiceLab]:
    put(service_lab, "code/predict.py", PREDICT.encode())
    put(service_lab, "checkpoints/step-00000001/model.safetensors", SAFETENSORS)
    yield service_lab
    stop_service(service_lab.remote, LAB, LAB_ID, "serve")


def picture(value: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (8, 8), value).save(file, "PNG")
    return file.getvalue()


def asked(url: str, content: bytes | None = None) -> dict[str, Any]:
    headers = {"Content-Type": "image/png"} if content else {}
    request = urllib.request.Request(url, content, headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        found: dict[str, Any] = json.loads(reply.read())
    return found


@pytest.mark.long
def test_a_model_answers_through_a_forward_and_a_pickle_in_its_place_is_refused(
    served: ServiceLab,
) -> None:
    service = ensure_service(served.remote, wish(served), served.reporter)
    assert ensure_service(served.remote, wish(served), served.reporter) == service
    with Forwarding(served.spec(service)) as forward:
        told = asked(f"{forward.url}healthz")
        assert told["model"] == {"run": "night", "checkpoint": "step-00000001", "classes": 2}
        (prediction,) = asked(f"{forward.url}predict", picture(255))["predictions"]
        assert (prediction["class"], prediction["probability"]) == ("light", 1.0)
    seen = served.inspect(service.container)
    assert seen["HostConfig"]["ReadonlyRootfs"]
    assert seen["HostConfig"]["CapDrop"] == ["ALL"]
    assert seen["HostConfig"]["PortBindings"]["8000/tcp"][0]["HostIp"] == "127.0.0.1"
    assert "read-only" in served.box.sh(f"docker logs {service.container}")
    another = ensure_service(served.remote, wish(served, "step-00000001"), served.reporter)
    assert served.inspect(another.container)["Id"] != seen["Id"]
    assert served.reporter.count("which was running with other settings") == 1
    served.box.sh(f"docker stop -t 60 {service.container}")
    assert served.inspect(service.container)["State"]["ExitCode"] == 0

    put(served, "checkpoints/step-00000002/model.safetensors", b"\x80\x04cos\nsystem\n.")
    for checkpoint in ("step-00000002", ""):
        with pytest.raises(PolicyError, match="refused the model") as refused:
            ensure_service(served.remote, wish(served, checkpoint), served.reporter)
        assert "model.safetensors' is a pickle" in refused.value.why
    chosen = ensure_service(served.remote, wish(served, "step-00000001"), served.reporter)
    assert chosen.container == service.container
