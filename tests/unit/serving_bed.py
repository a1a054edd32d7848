"""A model that needs no PyTorch, and pictures of every kind, for the tests of labctl's server."""

from __future__ import annotations

import http.client
import io
import json
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from PIL import Image, ImageStat

from labctl.services.model_server.app import ModelServer
from labctl.services.model_server.project import Model
from labctl.services.model_server.settings import ServeSettings

CLASSES = ("dark", "light")


class Brightness:
    """Tells dark pictures from light ones, and keeps the sizes of its batches."""

    classes = CLASSES

    def __init__(self) -> None:
        self.batches: list[int] = []

    def predict(self, images: list[Image.Image]) -> list[list[float]]:
        self.batches.append(len(images))
        light = [ImageStat.Stat(one.convert("L")).mean[0] / 255 for one in images]
        return [[1 - value, value] for value in light]


def model(predictor: Any = None, reference: tuple[int, ...] = ()) -> Model:
    return Model(predictor or Brightness(), CLASSES, "step-00000001", reference)


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    text: str

    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def reason(self) -> str:
        return str(self.json()["error"]["reason"])


@dataclass(frozen=True)
class Client:
    """Talks to a server in this process, over a connection of its own for each request."""

    port: int

    def get(self, path: str, **headers: str) -> Reply:
        return self._asked("GET", path, None, headers)

    def post(self, content: bytes | Iterable[bytes], kind: str = "image/png") -> Reply:
        """A body whose length is told where it is one piece."""
        return self._asked("POST", "/predict", content, {"Content-Type": kind})

    def form(self, *files: bytes) -> Reply:
        head = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n'
        body = b"".join(head + one + b"\r\n" for one in files) + b"--x--\r\n"
        return self.post(body, "multipart/form-data; boundary=x")

    def json(self, body: object) -> Reply:
        return self.post(json.dumps(body).encode(), "application/json")

    def metric(self, name: str) -> float | None:
        for line in self.get("/metrics").text.splitlines():
            if line.startswith(f"{name} "):
                return float(line.rpartition(" ")[2])
        return None

    def _asked(
        self, method: str, path: str, content: bytes | Iterable[bytes] | None, headers: Any
    ) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, content, headers)
            reply = connection.getresponse()
            told = {key.lower(): value for key, value in reply.getheaders()}
            return Reply(reply.status, told, reply.read().decode())
        finally:
            connection.close()


@contextmanager
def serving(served: Model | None = None, settings: ServeSettings | None = None) -> Iterator[Client]:
    """A client of a server in this process."""
    app = ModelServer(served or model(), settings or ServeSettings(), run="first").app
    with socket.create_server(("127.0.0.1", 0)) as listening:
        running = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=running.run, args=([listening],))
        thread.start()
        try:
            while not running.started:
                assert thread.is_alive()
                time.sleep(0.005)
            yield Client(listening.getsockname()[1])
        finally:
            running.should_exit = True
            thread.join(60)


def picture(value: int = 200, size: tuple[int, int] = (8, 8), kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("L", size, value).save(file, kind)
    return file.getvalue()


def bomb(width: int, height: int, rows: int = 0) -> bytes:
    """A PNG whose header claims a size; of its pixels only so many rows are there."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    packed = zlib.compress(bytes((width + 1) * rows), 1)
    parts = [_chunk(b"IHDR", header), _chunk(b"IDAT", packed), _chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _chunk(kind: bytes, content: bytes) -> bytes:
    check = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)


def safetensors(length: int = 0) -> bytes:
    """A file with one number in it; with `length`, its header is padded to so many bytes."""
    header = {"one": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    text = json.dumps(header).encode().ljust(length)
    return struct.pack("<Q", len(text)) + text + struct.pack("<f", 1.0)
