"""The Docker Engine's API on its Unix socket: the requests that a run's start needs.

The docker command takes 30 to 50 ms to start, a request to the socket less than 1 ms. The protocol
is HTTP/1.0, one connection a request: the end of a reply is then the end of its connection.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Callable, Iterator
from urllib.parse import quote

from ...wire.codec import Message, MessageError, decode, from_json, to_json
from ..broker.detection import LIMIT_KEY
from ..reply import Failure
from .docker import ATTEMPTS_S, PAUSE_S, UnreachableEngineError, run_docker
from .engine_objects import (
    Container,
    ContainerRow,
    DockerSettings,
    Image,
    Mount,
    MountTmpfsOptions,
    NewContainer,
    ProxySettings,
)
from .retry import repeat_pause, retry_on

SOCKET = "unix:///var/run/docker.sock"
# The newest API version used; an older engine gets its own version.
NEWEST = (1, 44)
# seconds after which an engine that has not answered counts as hung: a slow disk needs less
ANSWER_S = 120.0
_CHUNK = 256 * 1024


class EngineRequestError(Failure):
    """An error response of the engine. `status` is the HTTP status, 0 if no response came.

    `is_limit` is whether a shared server's broker refused because of its limits.
    """

    def __init__(self, status: int, message: str, is_limit: bool = False) -> None:
        super().__init__("docker", "the Docker Engine on the server refused the request", message)
        self.status = status
        self.message = message
        self.is_limit = is_limit


def inspect_image(reference: str) -> Image | None:
    """Return an image; None if it is not on this server."""
    body = inspect_image_document(reference)
    return None if body is None else convert_object(Image, body)


def inspect_image_document(reference: str) -> dict[str, Any] | None:
    """Return all that the engine says of an image, for the broker, which passes it on."""
    return _get_object(f"/images/{quote(reference, safe='/:@')}/json")


def inspect_containers(names: list[str]) -> dict[str, Container]:
    """Map name to container, for the containers that exist."""
    inspected = (inspect_container(name) for name in names)
    return {container.Name.lstrip("/"): container for container in inspected if container}


def inspect_container(name: str) -> Container | None:
    """Return a container by name or id; None if it does not exist."""
    body = inspect_container_document(name)
    return None if body is None else convert_object(Container, body)


def inspect_container_document(name: str) -> dict[str, Any] | None:
    """Return all that the engine says of a container, for the broker, which passes it on."""
    return _get_object(f"/containers/{name}/json")


def list_containers(*labels: str, all_states: bool = False) -> list[ContainerRow]:
    """List the running containers that have all of these labels; with `all_states`, the others too.

    A label is a name, or `name=value`.
    """
    path = f"/containers/json?all={int(all_states)}"
    if labels:
        path += f"&filters={quote(json.dumps({'label': labels}))}"
    return [convert_object(ContainerRow, row) for row in json.loads(call("GET", path))]


def convert_object(kind: type[Message], body: object) -> Message:
    """Convert an object of the engine's API; Failure (engine) if it has another shape."""
    try:
        return from_json(kind, body)
    except MessageError as error:
        what = "the Docker Engine on the server sent a response that labctl does not understand"
        raise Failure("engine", what, str(error), "labctl doctor") from None


def create_container(name: str, body: NewContainer) -> bool:
    """Create a container without starting it; return False if one of that name exists."""
    try:
        call("POST", f"/containers/create?name={name}", body)
    except EngineRequestError as refused:
        # Docker's API answers 409 for other conflicts too, and tells them apart by their text only.
        if refused.status == 409 and "is already in use" in refused.message:
            return False
        raise
    return True


def start_container(name: str) -> None:
    """Start a container and return once its first process runs; a running one is left alone."""
    call("POST", f"/containers/{name}/start")


def remove_container(name: str) -> None:
    """Kill and remove a container; an absent one is fine."""
    with suppress(EngineRequestError):
        call("DELETE", f"/containers/{name}?force=1")


def read_archive(name: str, path: str) -> bytes:
    """Return a tar with one file of a container, which need not run; b"" if the file is absent."""
    try:
        return call("GET", f"/containers/{name}/archive?path={path}")
    except EngineRequestError:
        return b""


def _get_object(path: str) -> dict[str, Any] | None:
    """Get the object at `path`, None if it does not exist. Retries while the engine restarts."""

    def get() -> bytes:
        try:
            return call("GET", path)
        except EngineRequestError as refused:
            if 400 <= refused.status < 500:
                return b"null"
            if refused.status:
                raise _make_engine_failure(refused) from None
            raise

    try:
        content = retry_on(EngineRequestError, get, repeat_pause(PAUSE_S, ATTEMPTS_S))
    except EngineRequestError as unanswered:
        raise _make_engine_failure(unanswered) from None
    body: dict[str, Any] | None = json.loads(content)
    return body


def _make_engine_failure(refused: EngineRequestError) -> Failure:
    what = "the Docker Engine on the server failed"
    return Failure("engine", what, refused.message, "labctl doctor")


def call(method: str, path: str, body: object = None, timeout_s: float = ANSWER_S) -> bytes:
    """Send one request; return the body of the response.

    Refused for an error, or for no response within `timeout_s`. Failure if no engine listens.
    """
    socket_path = _socket_path()
    target = f"/v{_negotiate_version(socket_path)}{path}"
    status, _, content = _exchange(socket_path, method, target, body, timeout_s)
    if status in (200, 201, 204, 304):
        return content
    raise _parse_refusal(status, content)


def _parse_refusal(status: int, content: bytes) -> EngineRequestError:
    is_limit = False
    try:
        body = json.loads(content)
        message, is_limit = str(body["message"]), body.get(LIMIT_KEY) is True
    except (ValueError, KeyError, TypeError, AttributeError):
        message = content.decode(errors="replace")
    return EngineRequestError(status, message.strip() or f"HTTP status {status}", is_limit)


@lru_cache(maxsize=None)
def _negotiate_version(socket_path: str) -> str:
    """Return the newest API version that both sides support; asked once."""
    status, headers, content = _exchange(socket_path, "GET", "/_ping", None)
    if status >= 500:
        raise _parse_refusal(status, content)
    numbers = tuple(int(p) for p in headers.get("api-version", "").split(".") if p.isdigit())
    return ".".join(map(str, min(numbers, NEWEST) if len(numbers) == 2 else NEWEST))


def _exchange(
    socket_path: str,
    method: str,
    target: str,
    body: object,
    timeout_s: float = ANSWER_S,
) -> tuple[int, dict[str, str], bytes]:
    """Return (status, headers in lower case, body)."""
    response = bytearray()
    deadline = time.monotonic() + timeout_s
    with _connect(socket_path) as link:
        try:
            link.settimeout(timeout_s)
            link.sendall(_build_request(method, target, body))
            while block := _receive(link, deadline):
                response += block
        except socket.timeout:
            message = f"the Docker Engine gave no answer within {timeout_s:g} s"
            raise EngineRequestError(0, message) from None
        except ConnectionError as error:
            raise EngineRequestError(
                0, f"the Docker Engine closed the connection: {error}"
            ) from None
    status, headers, content = _parse(bytes(response))
    if len(content) < _content_length(headers):
        raise EngineRequestError(0, "the Docker Engine closed the connection during its response")
    return status, headers, content


def _build_request(method: str, target: str, body: object) -> bytes:
    content = b"" if body is None else json.dumps(to_json(body, drop_defaults=True)).encode()
    head = f"{method} {target} HTTP/1.0\r\nHost: docker\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def _receive(link: socket.socket, deadline: float) -> bytes:
    """Return the next bytes, b"" at the end. socket.timeout once `deadline` has passed."""
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        raise socket.timeout
    link.settimeout(remaining_s)
    return link.recv(_CHUNK)


def _parse_head(response: bytes) -> tuple[int, dict[str, str], bytes]:
    """Return (status, headers in lower case, the bytes after the head)."""
    head, end, body = response.partition(b"\r\n\r\n")
    if not end:
        raise EngineRequestError(0, "the Docker Engine closed the connection during its response")
    lines = head.decode(errors="replace").split("\r\n")
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
    status = lines[0].split(" ")[1:2]
    if not lines[0].startswith("HTTP/1.") or not (status and status[0].isdecimal()):
        raise EngineRequestError(
            0, f"the Docker Engine sent a response that is not HTTP: {lines[0]!a}"
        )
    return int(status[0]), headers, body


_parse: Callable[[bytes], tuple[int, dict[str, str], bytes]] = _parse_head


def set_head_parser(parse: Callable[[bytes], tuple[int, dict[str, str], bytes]]) -> None:
    """Use another parser for response heads: the broker's, which takes 30 ms to import."""
    global _parse
    _parse = parse


def _content_length(headers: dict[str, str]) -> int:
    try:
        return int(headers.get("content-length", 0))
    except ValueError:
        raise EngineRequestError(0, "the Docker Engine sent an invalid Content-Length") from None


class ResponseStream:
    """A response that arrives in parts, such as a pull's. Closing it cancels the engine's work.

    Raises Refused for an error, as `call` does.
    """

    def __init__(self, method: str, path: str, silence_s: float) -> None:
        socket_path = _socket_path()
        target = f"/v{_negotiate_version(socket_path)}{path}"
        self._silence_s = silence_s
        self._link = _connect(socket_path)
        try:
            self._link.settimeout(silence_s)
            self._link.sendall(_build_request(method, target, None))
            self._first = self._read_head()
        except socket.timeout:
            self.close()
            raise self._make_silence_error() from None
        except BaseException:
            self.close()
            raise

    def _read_head(self) -> bytes:
        response, deadline = b"", time.monotonic() + self._silence_s
        while b"\r\n\r\n" not in response:
            block = _receive(self._link, deadline)
            if not block:
                break
            response += block
        status, _, body = _parse(response)
        if status != 200:
            while block := _receive(self._link, deadline):
                body += block
            raise _parse_refusal(status, body)
        return body

    def blocks(self, tick_s: float) -> Iterator[bytes]:
        """Yield the parts, and b"" after each `tick_s` without one.

        Refused after `silence_s` without any.
        """
        yield self._first
        heard_s = time.monotonic()
        self._link.settimeout(tick_s)
        while True:
            try:
                block = self._link.recv(_CHUNK)
            except socket.timeout:
                if time.monotonic() - heard_s > self._silence_s:
                    raise self._make_silence_error() from None
                yield b""
                continue
            if not block:
                return
            heard_s = time.monotonic()
            yield block

    def close(self) -> None:
        self._link.close()

    def __enter__(self) -> ResponseStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_silence_error(self) -> EngineRequestError:
        return EngineRequestError(0, f"the Docker Engine sent nothing for {self._silence_s:g} s")


def _connect(socket_path: str) -> socket.socket:
    """Connect to the engine. While it is being restarted, retry for ATTEMPTS_S."""

    def connect() -> socket.socket:
        link = socket.socket(socket.AF_UNIX)
        link.settimeout(ANSWER_S)  # connect() blocks while a hung engine accepts no connection
        try:
            link.connect(socket_path)
        except OSError as error:
            link.close()
            if isinstance(error, PermissionError):
                what = "the account on the server is not allowed to use Docker"
                raise Failure("engine", what, f"{socket_path}: {error}", "labctl doctor") from None
            run_docker("--version")  # raises at once if Docker is not installed
            raise
        return link

    try:
        return retry_on(OSError, connect, repeat_pause(PAUSE_S, ATTEMPTS_S))
    except OSError as error:
        raise UnreachableEngineError(f"{socket_path}: {error.strerror}") from None


def read_settings() -> DockerSettings:
    """Return the docker command's settings on this server; empty ones if it has none."""
    folder = os.environ.get("DOCKER_CONFIG") or str(Path.home() / ".docker")
    try:
        return decode(DockerSettings, (Path(folder) / "config.json").read_bytes())
    except (OSError, MessageError):
        return DockerSettings()


def _socket_path() -> str:
    """Return the socket that the docker command would use.

    DOCKER_HOST, a selected context, or the default.
    """
    host = os.environ.get("DOCKER_HOST") or _context_host() or SOCKET
    if not host.startswith("unix://"):
        what = f"Docker on the server is configured to use {host}"
        raise Failure("engine", what, "labctl needs the Unix socket of an engine on the server")
    return host[len("unix://") :]


def build_volume_mounts(image: Image, taken: set[str], size_bytes: int) -> list[Mount]:
    """Return tmpfs mounts for the volumes that an image declares, except those at `taken`.

    Without them the volumes would be on the server's disk, without a size limit.
    """
    volumes = set(image.config.Volumes or {}) - taken
    options = MountTmpfsOptions(size_bytes, Mode=0o1777)
    return [Mount("tmpfs", target, TmpfsOptions=options) for target in sorted(volumes)]


def _context_host() -> str:
    """Return the host of the selected Docker context (rootless Docker sets one), or ""."""
    context = os.environ.get("DOCKER_CONTEXT") or read_settings().currentContext
    if context in (None, "", "default"):
        return ""
    return run_docker("context", "inspect", "--format", "{{.Endpoints.docker.Host}}").stdout.strip()


def build_proxy_env() -> dict[str, str]:
    """Return the proxy variables that the docker command's settings give every container."""
    configured = read_settings().proxies or {}
    candidates = (configured.get("unix://" + _socket_path()), configured.get("default"))
    applicable = next((each for each in candidates if each and any(each)), ProxySettings())
    proxies = applicable._asdict()
    variables = {}
    for kind in ("http", "https", "ftp", "no", "all"):
        value = proxies[f"{kind}Proxy"]
        if value:
            variables[f"{kind}_proxy"] = variables[f"{kind.upper()}_PROXY"] = value
    return variables
