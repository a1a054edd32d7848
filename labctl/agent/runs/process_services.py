"""Services without containers: each is a session of processes that listens on the loopback.

The truth about a service is its record (service-NAME.json in the lab's .labctl), and whether its
first process lives. Its output is in service-NAME.log beside it.
"""

from __future__ import annotations

import shlex
import subprocess
import time
from pathlib import Path

from ...wire.codec import to_json
from ...wire.runs import ProcessRecord
from ...wire.services import (
    CODE,
    ListServicesReply,
    ListServicesRequest,
    ProcessServiceRecord,
    ServiceRecord,
    ServiceReply,
    ServiceRequest,
    StopServiceReply,
    StopServiceRequest,
)
from ...wire.verbs import CONFIG_FILE
from ..host.background import build_scope_words
from ..host.paths import (
    lab_dir,
    labctl_home,
    read_record,
    read_text,
    require_name,
    write_json,
    write_text,
)
from ..host.sessions import is_alive, read_stat, stop_session
from ..reply import Failure
from .enter_script import build_environment_lines, build_variable_lines
from .environments import use_environment
from .executor import Environment
from .healthcheck import is_http_ready, is_listening
from .known_services import (
    JUPYTER,
    KNOWN,
    MLFLOW,
    build_jupyter,
    build_mlflow,
    build_tensorboard,
)
from .process_executor import link_server_data, spawn_session
from .service_ports import find_free_port, is_free, is_own_listener
from .services import READY_S, ensure_token, find_token, get_port, hash_settings, lock_service

GRACE_S = 10
POLL_S = 0.1
LOG_CHARACTERS = 2000


def start(request: ServiceRequest) -> ServiceReply:
    """Start a service, or find it running; reply once its port answers, as `services.start`."""
    root = lab_dir(request.lab, request.lab_id)
    name = require_name(request.name)
    with lock_service(root, name):
        record = _read_live(root, name)
        is_stale = record is not None and record.settings != hash_settings(request)
        if record and not (is_stale and request.replace):
            _wait_until_ready(root, record, request)
            return ServiceReply(*_describe(root, name, record), found=True, stale=is_stale)
        environment = use_environment(request.image, request.lab_id)
        if environment is None or not (root / "code").is_dir():
            return ServiceReply(missing=request.image or CODE)
        if record:
            stop_session(_first_process(record), GRACE_S)
        record = _launch(root, request, environment)
        _wait_until_ready(root, record, request)
    return ServiceReply(*_describe(root, name, record), replaced=is_stale)


def status(request: ListServicesRequest) -> ListServicesReply:
    """List the services of the lab that were started, running or not."""
    root = lab_dir(request.lab, request.lab_id)
    named = [(name, _read(root, name)) for name in list_service_names(root)]
    return ListServicesReply(tuple(_describe(root, name, one) for name, one in named if one))


def stop(request: StopServiceRequest) -> StopServiceReply:
    """Stop one service, or all services of the lab. An absent service is not an error."""
    root = lab_dir(request.lab, request.lab_id)
    return StopServiceReply(_stop_services(root, request.name))


def stop_lab_services(lab_id: str) -> tuple[str, ...]:
    """Stop the services of a lab, whose name the caller does not know; return their names."""
    marks = labctl_home().glob("*/.labctl/id")
    roots = [mark.parent.parent for mark in marks if read_text(mark) == lab_id]
    return tuple(name for root in roots for name in _stop_services(root))


def _stop_services(root: Path, selected: str = "") -> tuple[str, ...]:
    stopped = []
    for name in list_service_names(root):
        if selected not in ("", name):
            continue
        record = _read_live(root, name)
        if record:
            stop_session(_first_process(record), GRACE_S)
            stopped.append(name)
        for path in (find_service_record(root, name), find_token(root, name)):
            if path.exists():
                path.unlink()
    return tuple(stopped)


def _launch(root: Path, request: ServiceRequest, environment: Environment) -> ProcessServiceRecord:
    """Start the service's session and record it. Failure if its program or its port is missing."""
    name, port = request.name, _choose_port(request)
    link_server_data(root, request.data)
    script = root / ".labctl" / f"service-{name}.sh"
    write_text(script, _build_script(root, request, environment, port), 0o700)
    if name in KNOWN and not request.command:
        _require_program(script, name)
    log = find_service_log(root, name)
    write_text(log, "")
    words = [*build_scope_words(), "sh", str(script), *_build_argv(request, port)]
    pid = spawn_session(words, str(log))
    stat = read_stat(pid)
    start_ticks = stat.start_ticks if stat else 0
    record = ProcessServiceRecord(pid, start_ticks, port, hash_settings(request))
    write_json(find_service_record(root, name), to_json(record))
    return record


def _choose_port(request: ServiceRequest) -> int:
    """Return the service's usual port, or a free one for a service that labctl starts itself."""
    port = get_port(request)
    if is_free(port):
        return port
    if request.command:
        raise make_port_failure(request.name, port)
    return find_free_port()


def make_port_failure(name: str, port: int) -> Failure:
    what = f"port {port} of the server, which {name} needs, is in use"
    hint = ("choose another port for it in ", CONFIG_FILE)
    return Failure("service", what, "another program listens there", hint)


def _build_argv(request: ServiceRequest, port: int) -> list[str]:
    if request.command:
        return list(request.command)
    return [*build_known_words(request.name), str(port)]


def build_known_words(name: str) -> list[str]:
    """Return the command of a service that labctl knows, without its last argument, the port."""
    script = build_tensorboard('"$LABCTL_LAB_DIR"/runs', "$LABCTL_LINKS_DIR", "127.0.0.1")
    if KNOWN[name].script == JUPYTER:
        script = build_jupyter('"$LABCTL_LAB_DIR"', "127.0.0.1")
    if KNOWN[name].script == MLFLOW:
        runs, view = '"$LABCTL_LAB_DIR"/runs', '"$LABCTL_LAB_DIR"/.labctl/mlflow'
        script = build_mlflow(runs, view, "127.0.0.1")
    return ["/bin/sh", "-c", script, name]


def _build_script(root: Path, request: ServiceRequest, environment: Environment, port: int) -> str:
    """Return the script that runs a command in the environment of a service."""
    own = {"LABCTL_SERVICE_PORT": str(port)}
    if request.gpus != "all":
        own["CUDA_VISIBLE_DEVICES"] = request.gpus
    lines = build_service_lines(root, request, environment, own)
    return "\n".join(["#!/bin/sh", *lines, 'exec "$@"', ""])


def build_service_lines(
    root: Path, request: ServiceRequest, environment: Environment, own: dict[str, str]
) -> list[str]:
    """Return the lines of a script that set the environment of a service; `own` are more variables.

    Makes the token of a service that has one.
    """
    variables = {
        **request.env,
        "LABCTL_DATA_DIR": str(root / "data"),
        "LABCTL_LAB_DIR": str(root),
        "LABCTL_LINKS_DIR": str(root / ".labctl" / "tensorboard"),
        **own,
    }
    if request.name == "jupyter":
        variables["JUPYTER_TOKEN_FILE"] = str(ensure_token(root, request.name))
    code = root / "code"
    lines = build_variable_lines(variables) + build_environment_lines(environment, code)
    return [*lines, f"cd {shlex.quote(str(code))} || exit 125"]


def _require_program(script: Path, name: str) -> None:
    """Failure (missing) if neither the environment nor the server has the program of a service."""
    words = ["sh", str(script), "sh", "-c", KNOWN[name].test]
    if subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True).returncode:
        raise make_missing_program_failure(name)


def make_missing_program_failure(name: str) -> Failure:
    package = "jupyterlab" if name == "jupyter" else name
    what = f"there is no {package} for the service {name} on the server"
    why = "without Docker, a service has the packages of the lab and the server's programs"
    hint = (f"add {package} to the list of packages that image: names in ", CONFIG_FILE)
    return Failure("missing", what, why, hint)


def _wait_until_ready(root: Path, record: ProcessServiceRecord, request: ServiceRequest) -> None:
    is_preset = request.name in KNOWN and not request.command
    limit_s = request.deadline_s or READY_S
    deadline_s = time.monotonic() + limit_s
    while True:
        if not is_alive(_first_process(record)):
            raise make_service_failure(root, request.name, "exited right after its start")
        if is_preset:
            # Another account that took the port first would receive the token of Jupyter.
            is_ready = is_own_listener(record.port) and is_http_ready(record.port)
        else:
            is_ready = is_listening(record.port)
        if is_ready:
            return
        if time.monotonic() >= deadline_s:
            stop_session(_first_process(record), GRACE_S)
            raise make_service_failure(root, request.name, f"did not answer within {limit_s:g} s")
        time.sleep(POLL_S)


def make_service_failure(root: Path, name: str, text: str) -> Failure:
    path = find_service_record(root, name)
    if path.exists():
        path.unlink()
    log = read_text(find_service_log(root, name))
    why = log[-LOG_CHARACTERS:] or "it printed nothing"
    hint = f"labctl forward {name}   # starts it again"
    return Failure("service", f"the service {name} {text}", why, hint)


def _describe(root: Path, name: str, record: ProcessServiceRecord) -> ServiceRecord:
    known = KNOWN.get(name)
    return ServiceRecord(
        name=name,
        port=record.port,
        socket="",
        token=read_text(find_token(root, name)) if name == "jupyter" else "",
        path=known.path if known else "/",
        container="",
        running=is_alive(_first_process(record)),
    )


def _first_process(record: ProcessServiceRecord) -> ProcessRecord:
    return ProcessRecord(record.pid, record.start_ticks)


def list_service_names(root: Path) -> list[str]:
    files = sorted((root / ".labctl").glob("service-*.json"))
    return [file.stem[len("service-") :] for file in files]


def _read(root: Path, name: str) -> ProcessServiceRecord | None:
    return read_record(ProcessServiceRecord, find_service_record(root, name))


def _read_live(root: Path, name: str) -> ProcessServiceRecord | None:
    record = _read(root, name)
    return record if record and is_alive(_first_process(record)) else None


def find_service_log(root: Path, name: str) -> Path:
    return root / ".labctl" / f"service-{name}.log"


def find_service_record(root: Path, name: str) -> Path:
    return root / ".labctl" / f"service-{name}.json"
