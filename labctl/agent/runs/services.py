"""Services: TensorBoard, Jupyter or any command with a port, each in a container of its own.

Truth is the container: its labels, and the port that Docker gave it on the server's loopback. The
container of a service is named `<lab directory>-svc-<name>`, so that there is at most one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..broker.detection import brokered
from ..host import engine
from ..host.docker import docker
from ..host.engine import image, inspect
from ..host.paths import checked_name, home, lab_dir, read_json, read_text, write_json, write_text
from ..reply import Failure, answer, finish
from . import serve
from .containers import lab_body, limits, mount
from .healthcheck import listens, speaks_http
from .images import failing_lines, streamed, wheelhouse
from .known_services import KNOWN, TOKEN_FILE

# How long a service may take until its port answers, unless the request says "deadline_s".
READY_S = 90.0


def start(request: dict[str, Any]) -> dict[str, Any]:
    """Start a service, or find it running; replies once its port answers.

    Replies {"missing": image} when the image is not here, and {"lacks": program, "tag": tag} when
    the image has to be extended first (verb `service-image`). Raises after "deadline_s" seconds,
    with the container's last words, and removes it. With "replace", one that runs with other
    settings ends for this one ("replaced").
    """
    root = lab_dir(request["lab"], request["lab_id"])
    name = checked_name(request["name"])
    with _only_one(root, name):
        container = _container(root, name)
        seen = inspect([container]).get(container)
        stale = False
        if seen and seen["State"]["Running"]:
            stale = _stale(seen, request)
            if not (stale and request.get("replace")):
                seen = _wait(container, request)
                return {**_told(root, seen, name), "found": True, "stale": stale}
        found = image(request["image"])
        if found is None:
            return {"missing": request["image"]}
        extended = _extended(found, request)
        if extended is None:
            return {"lacks": name, "tag": _tag(found, request)}
        body = _body(root, extended, request)
        if seen:
            _end(container)
        _launch(container, body, request)
        seen = _wait(container, request)
    return {**_told(root, seen, name), "found": False, "stale": False, "replaced": stale}


def status(request: dict[str, Any]) -> dict[str, Any]:
    """{"services": [...]}: every service of the lab that has a container, running or not."""
    root = lab_dir(request["lab"], request["lab_id"])
    seen = inspect(_containers(root, request["lab_id"]))
    return {
        "services": [
            _told(root, one, one["Config"]["Labels"]["labctl.service"])
            for _, one in sorted(seen.items())
        ]
    }


def stop(request: dict[str, Any]) -> dict[str, Any]:
    """Remove the service "name", or all of the lab; {"stopped": names}. An absent one is fine."""
    root = lab_dir(request["lab"], request["lab_id"])
    wanted = _container(root, checked_name(request["name"])) if request.get("name") else ""
    stopped = []
    for container in _containers(root, request["lab_id"]):
        if wanted not in ("", container):
            continue
        _end(container)
        name = container[len(_container(root, "")) :]
        token = _token_path(root, name)
        if token.exists():
            token.unlink()
        stopped.append(name)
    return {"stopped": sorted(stopped)}


def _end(container: str) -> None:
    """Stop it, with a while to finish what it is at, and remove it."""
    docker("stop", "--time", "10", container, check=False)
    engine.remove(container)


def build(request: dict[str, Any]) -> None:
    """Extend "image" by the text of "dockerfile"; output streamed and logged, as `build` does."""
    root = lab_dir(request["lab"], request["lab_id"])
    found = image(request["image"])
    if found is None:
        raise Failure("missing", f"the image {request['image']} is not on the server")
    if brokered():
        said = f"{request['image']} lacks {request['name']}, and this shared server adds nothing"
        hint = "ask the course's staff for an image with it, or install it in your own image"
        raise Failure("policy", said, "its images are built without Docker's engine", hint)
    tag = _tag(found, request)
    context = root / "builds" / tag.replace(":", "-")
    context.mkdir(parents=True, exist_ok=True)
    write_text(context / "Dockerfile", request["dockerfile"])
    log = context / "build.log"
    answer({"log": str(log), "tag": tag})
    with wheelhouse(bool(request.get("wheelhouse"))) as wheel_args:
        words = ["docker", "build", "--tag", tag]
        words += ["--label", "labctl.lab-id=" + request["lab_id"]]
        for key, value in {**request.get("args", {}), **wheel_args, "BASE": found["Id"]}.items():
            words += ["--build-arg", f"{key}={value}"]
        if wheel_args:
            words += ["--network", "host"]
        code, lines = streamed([*words, str(context)], log)
    finish({"code": code, "log": str(log), "tag": tag, "tail": failing_lines(lines)})


def _container(root: Path, name: str) -> str:
    return f"{root.name}-svc-{name}"


def _containers(root: Path, lab_id: str) -> list[str]:
    """Names of this lab's service containers on this server."""
    words = ["ps", "--all", "--format", "{{.Names}}", "--filter", "label=labctl.service"]
    found = docker(*words, "--filter", f"label=labctl.lab-id={lab_id}").stdout.split()
    return [one for one in found if one.startswith(_container(root, ""))]


@contextmanager
def _only_one(root: Path, name: str) -> Iterator[None]:
    """Two callers who want the same service wait for each other."""
    with (root / ".labctl" / f"service-{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _tag(found: dict[str, Any], request: dict[str, Any]) -> str:
    args = {k: v for k, v in request.get("args", {}).items() if k != "BASE"}
    text = json.dumps([found["Id"], request.get("dockerfile", ""), args], sort_keys=True)
    return "labctl-services:" + hashlib.sha256(text.encode()).hexdigest()[:16]


def _extended(found: dict[str, Any], request: dict[str, Any]) -> dict[str, Any] | None:
    """The image to start: this one, or the one made from it; None when that is not made yet."""
    known = KNOWN.get(request["name"])
    if known is None or request.get("command"):
        return found
    path = home() / ".passwd" / f"programs-{found['Id'].rpartition(':')[2][:24]}.json"
    programs = read_json(path)
    if request["name"] not in programs:
        words = ["run", "--rm", "--network", "none", "--entrypoint", "/bin/sh", found["Id"]]
        done = docker(*words, "-c", f"{known['test']} >/dev/null 2>&1", check=False)
        programs[request["name"]] = done.returncode == 0
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, programs)
    return found if programs[request["name"]] else image(_tag(found, request))


def _port(request: dict[str, Any]) -> int:
    """The port inside the container."""
    port = int(request.get("port") or KNOWN.get(request["name"], {}).get("port", 0))
    if not 0 < port < 65536:
        said = f"the service {request['name']} needs a port"
        raise Failure("usage", said, "", "give it one in lab.yaml: services: {NAME: {port: 8000}}")
    return port


def _inner(request: dict[str, Any]) -> list[str]:
    """argv of the service, or [] when nobody said what to start."""
    if request.get("command") or request.get("as_is"):
        return list(request.get("command", ()))
    known = KNOWN.get(request["name"])
    if known is None:
        said = f"nothing says how to start the service {request['name']}"
        raise Failure("usage", said, "", "give it a command in lab.yaml")
    return ["/bin/sh", "-c", known["script"], request["name"], str(_port(request))]


def _wish(request: dict[str, Any]) -> str:
    wish = [request["image"], _inner(request), _port(request), request.get("gpus", "")]
    wish += serve.wish(request) or ([request["env"]] if request.get("env") else [])
    return hashlib.sha256(json.dumps(wish).encode()).hexdigest()[:16]


def _stale(seen: dict[str, Any], request: dict[str, Any]) -> bool:
    """Whether it was started with another image, command or port than now asked for."""
    return bool(seen["Config"]["Labels"].get("labctl.service-wish") != _wish(request))


def _launch(container: str, body: dict[str, Any], request: dict[str, Any]) -> None:
    try:
        if not engine.create(container, body):
            raise engine.Refused(409, f"there is a container {container} already")
        engine.start(container)
    except engine.Refused as refused:
        engine.remove(container)
        said = f"the service {request['name']} did not start"
        raise Failure("docker", said, refused.message[-1500:], "labctl doctor") from None


def _body(root: Path, found: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """The container of a service, as the engine's `create` takes it."""
    name, argv, port = request["name"], _inner(request), _port(request)
    env = {**request.get("env", {}), "LABCTL_DATA_DIR": "/lab/data"}
    env["LABCTL_SERVICE_PORT"] = str(port)
    if request.get("model"):
        mounts = serve.mounts(root, request)
        env.update(serve.env(request))
    else:
        mounts = _lab_mounts(root, request)
    if name == "jupyter":
        mounts.append(mount(_token(root, name), TOKEN_FILE, read_only=True))
        env["JUPYTER_TOKEN_FILE"] = TOKEN_FILE
    labels = {"labctl.service": name, "labctl.service-port": str(port)}
    labels["labctl.service-wish"] = _wish(request)
    body = lab_body(root, request, found, mounts, env, labels)
    body["ExposedPorts"] = {f"{port}/tcp": {}}
    published = [{"HostIp": "127.0.0.1", "HostPort": ""}]
    body["HostConfig"].update({"Init": True, "PortBindings": {f"{port}/tcp": published}})
    if request.get("model"):
        body["HostConfig"].update(serve.host_config(request))
    if request.get("as_is"):
        body["HostConfig"].update(limits(request))
        body["WorkingDir"] = (found.get("Config") or {}).get("WorkingDir") or "/"
        body.update({"Cmd": argv} if argv else {})
    elif request.get("command"):
        body["Cmd"] = argv
    else:
        body["Entrypoint"], body["Cmd"] = argv[:1], argv[1:]
    return body


def _lab_mounts(root: Path, request: dict[str, Any]) -> list[dict[str, Any]]:
    """The lab's code and runs. Somebody else's image (`as_is`) may not write there."""
    for each in ("code", "runs"):
        (root / each).mkdir(exist_ok=True)
    foreign = bool(request.get("as_is"))
    reads_only = foreign or request["name"] == "tensorboard"
    return [
        mount(root / "code", "/lab/code", read_only=foreign),
        mount(root / "runs", "/lab/runs", read_only=reads_only),
    ]


def _token_path(root: Path, name: str) -> Path:
    return root / ".labctl" / f"service-{name}.token"


def _token(root: Path, name: str) -> Path:
    """The file with the service's token, made once: an address that was printed stays good."""
    path = _token_path(root, name)
    if not path.exists():
        write_text(path, secrets.token_urlsafe(32), 0o600)
    return path


def _told(root: Path, seen: dict[str, Any], name: str) -> dict[str, Any]:
    return {
        "name": name,
        "port": _inner_port(seen) if _socket(seen) else _published(seen),
        "socket": _socket(seen),
        "token": read_text(_token_path(root, name)) if name == "jupyter" else "",
        "path": KNOWN.get(name, {}).get("path", "/"),
        "container": seen["Name"].lstrip("/"),
        "running": bool(seen["State"]["Running"]),
    }


def _published(seen: dict[str, Any]) -> int:
    """The port on the server's loopback, 0 while there is none."""
    bound = (seen["NetworkSettings"].get("Ports") or {}).get(f"{_inner_port(seen)}/tcp") or []
    return int(bound[0]["HostPort"]) if bound else 0


def _inner_port(seen: dict[str, Any]) -> int:
    return int(seen["Config"]["Labels"].get("labctl.service-port") or 0)


def _socket(seen: dict[str, Any]) -> str:
    """Where a shared server's broker (networks.py) has the service instead of a port."""
    return str(seen["Config"]["Labels"].get("labctl.service-socket", ""))


def _wait(container: str, request: dict[str, Any]) -> dict[str, Any]:
    """What `docker inspect` says of the container once its port answers."""
    name = request["name"]
    known = name in KNOWN and not request.get("command")
    limit_s = float(request.get("deadline_s") or READY_S)
    deadline = time.monotonic() + limit_s
    while True:
        seen = inspect([container]).get(container)
        if seen is None or not seen["State"]["Running"]:
            raise _ended(container, seen, request)
        place = _socket(seen) or _published(seen)
        if place and (speaks_http(place) if known else listens(place)):
            return seen
        if time.monotonic() >= deadline:
            raise _failed(container, f"the service {name} did not answer within {limit_s:g} s")
        time.sleep(0.2)


def _ended(container: str, seen: dict[str, Any] | None, request: dict[str, Any]) -> Failure:
    failure = _failed(container, f"the service {request['name']} ended as soon as it was started")
    if not request.get("model"):
        return failure
    return serve.failure((seen or {"State": {}})["State"].get("ExitCode"), failure.body["why"])


def _failed(container: str, said: str) -> Failure:
    done = docker("logs", "--tail", "20", container, check=False)
    engine.remove(container)
    return Failure("service", said, (done.stdout + done.stderr).strip()[-2000:])
