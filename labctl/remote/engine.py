"""The Docker Engine's own interface on its Unix socket: what a container's start has to ask.

Starting the docker command costs 30 to 50 ms each time, asking the socket under one. HTTP/1.0 is
spoken, one connection a request: then the end of a reply is the end of its connection.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Callable
from urllib.parse import quote

from .docker import ATTEMPTS_S, docker
from .reply import Failure

SOCKET = "unix:///var/run/docker.sock"
NEWEST = (1, 44)
"""The newest interface that is spoken; an older engine is asked in its own."""
PAUSE_S = 0.5
_CHUNK = 256 * 1024


class Refused(Failure):
    """The engine's answer was an error. `status` is HTTP's, 0 where no answer came."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__("docker", "the Docker Engine on the server refused", message)
        self.status = status
        self.message = message


def image(reference: str) -> dict[str, Any] | None:
    """What `docker image inspect` says; None where the image is not here."""
    return _object(f"/images/{quote(reference, safe='/:@')}/json")


def inspect(names: list[str]) -> dict[str, dict[str, Any]]:
    """name -> what `docker container inspect` says, for those that exist."""
    found = [_object(f"/containers/{name}/json") for name in names]
    return {one["Name"].lstrip("/"): one for one in found if one}


def create(name: str, body: dict[str, Any]) -> bool:
    """Make a container that does not run yet; False where there is one of that name."""
    try:
        ask("POST", f"/containers/create?name={name}", body)
    except Refused as refused:
        if refused.status == 409 and "is already in use" in refused.message:
            return False
        raise
    return True


def start(name: str) -> None:
    """Returns once its first process runs; one that runs already is left alone."""
    ask("POST", f"/containers/{name}/start")


def remove(name: str) -> None:
    """Kill and remove a container; an absent one is fine."""
    with suppress(Refused):
        ask("DELETE", f"/containers/{name}?force=1")


def archive(name: str, path: str) -> bytes:
    """A tar with one file of a container that need not run; b"" where there is none."""
    try:
        return ask("GET", f"/containers/{name}/archive?path={path}")
    except Refused:
        return b""


def _object(path: str) -> dict[str, Any] | None:
    """What lies at `path`, None where it does not exist. Asked again while the engine restarts."""
    deadline = time.monotonic() + ATTEMPTS_S
    while True:
        try:
            found: dict[str, Any] = json.loads(ask("GET", path))
            return found
        except Refused as refused:
            if 400 <= refused.status < 500:
                return None
            if refused.status or time.monotonic() >= deadline:
                said = "the Docker Engine on the server failed"
                raise Failure("engine", said, refused.message, "labctl doctor") from None
        time.sleep(PAUSE_S)


def ask(method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
    """One request; the body of its reply. Refused for an error, Failure where nobody listens."""
    where = _socket_path()
    status, _, content = _exchange(where, method, f"/v{_version(where)}{path}", body)
    if status in (200, 201, 204, 304):
        return content
    try:
        message = str(json.loads(content)["message"])
    except (ValueError, KeyError, TypeError):
        message = content.decode(errors="replace")
    raise Refused(status, message.strip() or f"HTTP status {status}")


@lru_cache(maxsize=None)
def _version(where: str) -> str:
    """The interface that both sides speak, asked once."""
    said = _exchange(where, "GET", "/_ping", None)[1].get("api-version", "")
    numbers = tuple(int(part) for part in said.split(".") if part.isdigit())
    return ".".join(map(str, min(numbers, NEWEST) if len(numbers) == 2 else NEWEST))


def _exchange(
    where: str, method: str, target: str, body: dict[str, Any] | None
) -> tuple[int, dict[str, str], bytes]:
    """(status, headers in lower case, body)."""
    content = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {target} HTTP/1.0\r\nHost: docker\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}\r\n\r\n"
    said = bytearray()
    with _connected(where) as link:
        try:
            link.sendall(head.encode() + content)
            while True:
                block = link.recv(_CHUNK)
                if not block:
                    break
                said += block
        except ConnectionError as error:
            raise Refused(0, f"the Docker Engine ended while it was asked: {error}") from None
    status, headers, rest = _parse(bytes(said))
    if len(rest) < int(headers.get("content-length", 0)):
        raise Refused(0, "the Docker Engine ended while it was asked")
    return status, headers, rest


def _parse_head(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    """(status, headers in lower case, what follows)."""
    top, end, rest = answer.partition(b"\r\n\r\n")
    lines = top.decode(errors="replace").split("\r\n")
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
    status = lines[0].split(" ")[1:2]
    if not end or not status:
        raise Refused(0, "the Docker Engine ended while it was asked")
    return int(status[0]), headers, rest


_parse: Callable[[bytes], tuple[int, dict[str, str], bytes]] = _parse_head


def parse_with(parse: Callable[[bytes], tuple[int, dict[str, str], bytes]]) -> None:
    """Have another parser read answers from now on: the broker's, which takes 30 ms to import."""
    global _parse
    _parse = parse


def _connected(where: str) -> socket.socket:
    """A connection to the engine. One that is being restarted is asked again for ATTEMPTS_S."""
    deadline = time.monotonic() + ATTEMPTS_S
    while True:
        link = socket.socket(socket.AF_UNIX)
        try:
            link.connect(where)
            return link
        except OSError as error:
            link.close()
            if isinstance(error, PermissionError):
                said = "the server's user may not use Docker"
                raise Failure("engine", said, f"{where}: {error}", "labctl doctor") from None
            docker("--version")  # without it there is nobody to wait for
            if time.monotonic() >= deadline:
                raise _silent(where, error) from None
        time.sleep(PAUSE_S)


def _silent(path: str, error: OSError) -> Failure:
    return Failure(
        "engine",
        "the Docker Engine on the server does not answer",
        f"{path}: {error.strerror}",
        "labctl ssh -- systemctl status docker",
    )


def settings() -> dict[str, Any]:
    """The docker command's own settings on this server; {} where there are none."""
    folder = os.environ.get("DOCKER_CONFIG") or str(Path.home() / ".docker")
    try:
        found = json.loads((Path(folder) / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _socket_path() -> str:
    """Where the docker command would go: DOCKER_HOST, a chosen context, or the usual place."""
    host = os.environ.get("DOCKER_HOST") or _host_of_context() or SOCKET
    if not host.startswith("unix://"):
        said = f"Docker on the server is reached through {host}"
        raise Failure("engine", said, "labctl needs the Unix socket of an engine there")
    return host[len("unix://") :]


def covers(image: dict[str, Any], taken: set[str], size_bytes: int) -> list[dict[str, Any]]:
    """Mounts of memory in place of the volumes that an image names, those at `taken` aside: they
    would lie on the server's disk, without a bound."""
    named = set((image.get("Config") or {}).get("Volumes") or {}) - taken
    bound = {"SizeBytes": size_bytes, "Mode": 0o1777}
    return [{"Type": "tmpfs", "Target": one, "TmpfsOptions": bound} for one in sorted(named)]


def _host_of_context() -> str:
    """Where the context leads that somebody chose (rootless Docker does); "" for the default."""
    chosen = os.environ.get("DOCKER_CONTEXT") or settings().get("currentContext")
    if chosen in (None, "", "default"):
        return ""
    return docker("context", "inspect", "--format", "{{.Endpoints.docker.Host}}").stdout.strip()


def proxies() -> dict[str, str]:
    """The proxy variables that the docker command gives every container, from its settings."""
    known = settings().get("proxies") or {}
    own = known.get("unix://" + _socket_path()) or known.get("default") or {}
    found = {}
    for kind in ("http", "https", "ftp", "no", "all"):
        value = own.get(f"{kind}Proxy")
        if value:
            found[f"{kind}_proxy"] = found[f"{kind.upper()}_PROXY"] = str(value)
    return found
