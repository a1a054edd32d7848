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
from typing import Any, Callable, Iterator
from urllib.parse import quote

from ..reply import Failure
from .docker import ATTEMPTS_S, docker

SOCKET = "unix:///var/run/docker.sock"
# The newest interface that is spoken; an older engine is asked in its own.
NEWEST = (1, 44)
PAUSE_S = 0.5
ANSWER_S = 120.0  # an engine that has not answered by then counts as hung: a slow disk needs less
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


def ask(
    method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float = ANSWER_S
) -> bytes:
    """One request; the body of its reply. Refused for an error or for no reply within `timeout_s`,
    Failure where nobody listens."""
    where = _socket_path()
    target = f"/v{_version(where)}{path}"
    status, _, content = _exchange(where, method, target, body, timeout_s)
    if status in (200, 201, 204, 304):
        return content
    raise _refused(status, content)


def _refused(status: int, content: bytes) -> Refused:
    try:
        message = str(json.loads(content)["message"])
    except (ValueError, KeyError, TypeError):
        message = content.decode(errors="replace")
    return Refused(status, message.strip() or f"HTTP status {status}")


@lru_cache(maxsize=None)
def _version(where: str) -> str:
    """The interface that both sides speak, asked once."""
    status, headers, content = _exchange(where, "GET", "/_ping", None)
    if status >= 500:
        raise _refused(status, content)
    numbers = tuple(int(p) for p in headers.get("api-version", "").split(".") if p.isdigit())
    return ".".join(map(str, min(numbers, NEWEST) if len(numbers) == 2 else NEWEST))


def _exchange(
    where: str,
    method: str,
    target: str,
    body: dict[str, Any] | None,
    timeout_s: float = ANSWER_S,
) -> tuple[int, dict[str, str], bytes]:
    """(status, headers in lower case, body)."""
    said = bytearray()
    deadline = time.monotonic() + timeout_s
    with _connected(where) as link:
        try:
            link.settimeout(timeout_s)
            link.sendall(_request(method, target, body))
            while block := _receive(link, deadline):
                said += block
        except socket.timeout:
            message = f"the Docker Engine gave no answer within {timeout_s:g} s"
            raise Refused(0, message) from None
        except ConnectionError as error:
            raise Refused(0, f"the Docker Engine ended while it was asked: {error}") from None
    status, headers, rest = _parse(bytes(said))
    if len(rest) < _length(headers):
        raise Refused(0, "the Docker Engine ended while it was asked")
    return status, headers, rest


def _request(method: str, target: str, body: dict[str, Any] | None) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {target} HTTP/1.0\r\nHost: docker\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def _receive(link: socket.socket, deadline: float) -> bytes:
    """The next bytes, b"" at the end. An answer that never ends is out of time, too."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise socket.timeout
    link.settimeout(left_s)
    return link.recv(_CHUNK)


def _parse_head(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    """(status, headers in lower case, what follows)."""
    top, end, rest = answer.partition(b"\r\n\r\n")
    if not end:
        raise Refused(0, "the Docker Engine ended while it was asked")
    lines = top.decode(errors="replace").split("\r\n")
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
    status = lines[0].split(" ")[1:2]
    if not lines[0].startswith("HTTP/1.") or not (status and status[0].isdecimal()):
        raise Refused(0, f"the Docker Engine answered with something else than HTTP: {lines[0]!a}")
    return int(status[0]), headers, rest


_parse: Callable[[bytes], tuple[int, dict[str, str], bytes]] = _parse_head


def parse_with(parse: Callable[[bytes], tuple[int, dict[str, str], bytes]]) -> None:
    """Have another parser read answers from now on: the broker's, which takes 30 ms to import."""
    global _parse
    _parse = parse


def _length(headers: dict[str, str]) -> int:
    try:
        return int(headers.get("content-length", 0))
    except ValueError:
        raise Refused(0, "the Docker Engine told no length of its answer") from None


class Stream:
    """An answer that comes bit by bit, such as a pull's. Closing it ends the engine's work.

    Refused for an error, as with `ask`.
    """

    def __init__(self, method: str, path: str, silence_s: float) -> None:
        where = _socket_path()
        target = f"/v{_version(where)}{path}"
        self._silence_s = silence_s
        self._link = _connected(where)
        try:
            self._link.settimeout(silence_s)
            self._link.sendall(_request(method, target, None))
            self._first = self._read_head()
        except socket.timeout:
            self.close()
            raise self._silent() from None
        except BaseException:
            self.close()
            raise

    def _read_head(self) -> bytes:
        said, deadline = b"", time.monotonic() + self._silence_s
        while b"\r\n\r\n" not in said:
            block = _receive(self._link, deadline)
            if not block:
                break
            said += block
        status, _, rest = _parse(said)
        if status != 200:
            while block := _receive(self._link, deadline):
                rest += block
            raise _refused(status, rest)
        return rest

    def blocks(self, tick_s: float) -> Iterator[bytes]:
        """What comes; b"" after each `tick_s` in which nothing does. Refused after silence."""
        yield self._first
        heard_s = time.monotonic()
        self._link.settimeout(tick_s)
        while True:
            try:
                block = self._link.recv(_CHUNK)
            except socket.timeout:
                if time.monotonic() - heard_s > self._silence_s:
                    raise self._silent() from None
                yield b""
                continue
            if not block:
                return
            heard_s = time.monotonic()
            yield block

    def close(self) -> None:
        self._link.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _silent(self) -> Refused:
        return Refused(0, f"the Docker Engine said nothing for {self._silence_s:g} s")


def _connected(where: str) -> socket.socket:
    """A connection to the engine. One that is being restarted is asked again for ATTEMPTS_S."""
    deadline = time.monotonic() + ATTEMPTS_S
    while True:
        link = socket.socket(socket.AF_UNIX)
        link.settimeout(ANSWER_S)  # an engine that accepts nothing lets others wait here
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
