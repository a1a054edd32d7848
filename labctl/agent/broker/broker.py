"""The broker of a shared server: the only way from an account to the Docker Engine.

It runs as root and serves the engine's API on a Unix socket, so that labctl and the docker command
work as they do with the engine. The kernel identifies the client (SO_PEERCRED). A request that is
not in ROUTES is refused, and another account's objects are not found.
"""

from __future__ import annotations

import grp
import os
import pwd
import re
import resource
import socket
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Callable

from ...wire.broker import ServeBrokerRequest
from ..host import engine
from ..reply import Failure
from . import mounts, networks
from .calls import Calls
from .claims import Claims
from .detection import BROKER, JOBS
from .gpu_leases import GpuReader
from .gpu_queue import GpuQueue
from .housekeeping import Housekeeping, describe_error
from .http import HttpRefusal, Request, read_request, send_refusal, send_response
from .relay import parse_head
from .rules import BrokerAccount
from .settings import BrokerSettings, load

# connections of one account; followers and terminals keep theirs open for a long time
MOST_AT_ONCE = 64
MOST_FILES = 65536
PAUSE_S = 0.1
KEEP_EVERY_S = 2.0
SETTINGS = "/etc/labctl/broker.json"
NO_BUILD = (
    "a shared server does not offer `docker build`, whose steps would exceed the account's limits. "
    "Build the image on your own computer and push it to a registry, or send it: "
    "docker save NAME | labctl ssh -- docker load"
)
Handler = Callable[[Calls, BrokerAccount, Request, str], None]
ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET|HEAD", "/_ping", Calls.pass_plain),
    ("GET", "/version", Calls.pass_plain),
    ("GET", "/info", Calls.send_info),
    ("GET", "/labctl/gpus", Calls.send_gpus),
    ("GET", "/images/(.+)/json", Calls.send_image),
    ("DELETE", "/images/(.+)", Calls.remove_image),
    ("POST", "/images/create", Calls.pull),
    ("POST", "/images/load", Calls.load),
    ("GET", "/containers/json", Calls.list_containers_of),
    ("POST", "/containers/create", Calls.create),
    ("GET", "/containers/([^/]+)/json", Calls.inspect),
    ("GET", "/containers/([^/]+)/archive", Calls.send_passwd_file),
    ("POST", "/containers/([^/]+)/start", Calls.start),
    ("POST", "/containers/([^/]+)/exec", Calls.exec),
    ("GET", "/containers/([^/]+)/(?:logs|stats|top)", Calls.pass_to_container),
    ("POST", "/containers/([^/]+)/(?:stop|kill|wait|attach|resize)", Calls.pass_to_container),
    ("DELETE", "/containers/([^/]+)", Calls.remove),
    ("GET", "/exec/([^/]+)/json", Calls.pass_to_exec),
    ("POST", "/exec/([^/]+)/(?:start|resize)", Calls.pass_to_exec),
)


def run(request: ServeBrokerRequest) -> None:
    """Serve until the process ends."""
    os.umask(0o022)
    settings = load(Path(request.settings or SETTINGS))
    if os.geteuid() != 0:
        raise Failure("usage", "the broker must run as root")
    os.environ["DOCKER_HOST"] = engine.SOCKET
    engine.set_head_parser(parse_head)
    _raise_file_limit()
    if settings.needs_job:
        JOBS.mkdir(mode=0o700, parents=True, exist_ok=True)
    mounts.prepare_directory()
    networks.install_firewall()
    gpus = GpuReader()
    keeping = Housekeeping(settings, Claims(settings, GpuQueue(), gpus.identify), _log)
    keeping.run_round()
    threading.Thread(target=_run_housekeeping, args=(keeping,), daemon=True).start()
    Broker(settings, Calls(settings, keeping, gpus)).serve(Path(BROKER))


def _raise_file_limit() -> None:
    """Raise the limit of open files: connections need several each, and 1024 is too few."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _run_housekeeping(keeping: Housekeeping) -> None:
    while True:
        time.sleep(KEEP_EVERY_S)
        keeping.run_round()


class Broker:
    """Accepts connections, identifies the account, and finds the call that answers."""

    def __init__(self, settings: BrokerSettings, calls: Calls) -> None:
        self.settings = settings
        self.calls = calls
        self._busy: Counter[int] = Counter()
        self._guard = threading.Lock()
        self._routes = [
            (re.compile(methods), re.compile(path), handler) for methods, path, handler in ROUTES
        ]

    def serve(self, socket_path: Path) -> None:
        # An account that could write there could impersonate the broker.
        socket_path.parent.chmod(0o755)
        with suppress(FileNotFoundError):
            socket_path.unlink()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(socket_path))
            os.chown(socket_path, 0, grp.getgrnam(self.settings.group).gr_gid)
            socket_path.chmod(0o660)
            listener.listen(128)
            _log(f"ready at {socket_path}")
            while True:
                try:
                    link, _ = listener.accept()
                    self._start_thread(link)
                except (OSError, RuntimeError) as error:  # too many files or threads
                    _log(f"a connection was not accepted: {error}")
                    time.sleep(PAUSE_S)

    def _start_thread(self, link: socket.socket) -> None:
        """Start a thread for a connection, or refuse it if the account has too many."""
        uid = networks.read_peer(link)[1]
        with self._guard:
            has_too_many = self._busy[uid] >= MOST_AT_ONCE
            self._busy[uid] += 0 if has_too_many else 1
        if has_too_many:
            with link, suppress(OSError):
                send_response(
                    link,
                    429,
                    {"message": f"this account has more than {MOST_AT_ONCE} connections open"},
                )
            return
        try:
            threading.Thread(target=self._serve_connection, args=(link, uid), daemon=True).start()
        except RuntimeError:
            self._count_down(uid)
            link.close()
            raise

    def _count_down(self, uid: int) -> None:
        with self._guard:
            self._busy[uid] -= 1

    def _serve_connection(self, link: socket.socket, uid: int) -> None:
        try:
            with link, suppress(OSError):
                try:
                    request = read_request(link)
                    if request is not None:
                        self._answer(find_account(uid, self.settings.group), request)
                except HttpRefusal as refusal:
                    send_refusal(link, refusal)
        finally:
            self._count_down(uid)

    def _answer(self, account: BrokerAccount, request: Request) -> None:
        try:
            for methods, path, handler in self._routes:
                match = path.fullmatch(request.path)
                if match and methods.fullmatch(request.method):
                    handler(self.calls, account, request, match.group(1) if path.groups else "")
                    return
        except engine.EngineRequestError as refused:
            raise HttpRefusal(refused.status or 500, refused.message) from None
        except Failure as failure:
            raise HttpRefusal(500, failure.report.what) from None
        except (HttpRefusal, OSError):
            raise
        except Exception as error:  # the engine sent something unexpected
            _log(f"{request.method} {request.path[:100]!a} failed: {describe_error(error)}")
            raise HttpRefusal(
                500, "the Docker Engine sent a response that cannot be parsed"
            ) from None
        if request.path == "/build":
            raise HttpRefusal(403, NO_BUILD)
        raise HttpRefusal(
            403, f"a shared server does not offer {request.method} {request.path[:100]}"
        )


def find_account(uid: int, group: str) -> BrokerAccount:
    """Return the account as the machine's files define it now. Refusal if it has no access.

    A process keeps the groups with which it started, so processes of a removed account must not be
    trusted by their groups.
    """
    try:
        entry = pwd.getpwuid(uid)
        group_id = grp.getgrnam(group).gr_gid
    except KeyError:
        raise HttpRefusal(403, f"uid {uid} has no account on this server") from None
    if group_id not in os.getgrouplist(entry.pw_name, entry.pw_gid):
        raise HttpRefusal(403, f"{entry.pw_name} no longer has access to this shared server")
    return BrokerAccount(uid, entry.pw_gid, entry.pw_name, os.path.realpath(entry.pw_dir))


def _log(text: str) -> None:
    sys.stderr.write(f"labctl-broker: {text}\n")
    sys.stderr.flush()
