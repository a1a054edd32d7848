"""The broker of a shared server: the only way from an account to the Docker Engine.

It runs as root and speaks the engine's own interface on a Unix socket, so that labctl and the
docker command work as they do with the engine. Who asks is what the kernel says (SO_PEERCRED).
What is not named in ROUTES does not exist, what belongs to another account is not found.
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
from typing import Any, Callable

from ..host import engine
from ..reply import Failure
from . import mounts, networks
from .calls import Calls
from .claims import Claims
from .detection import BROKER
from .gpu_leases import GpuReader
from .gpu_queue import GpuQueue
from .housekeeping import Keeping, describe_error
from .http import Refusal, Request, read_request, refuse, say
from .relay import parse_head
from .rules import Account
from .settings import Settings, load

# Connections of one account. Followers and terminals hold theirs for long.
MOST_AT_ONCE = 64
MOST_FILES = 65536
PAUSE_S = 0.1
KEEP_EVERY_S = 2.0
Deed = Callable[[Calls, Account, Request, str], None]
ROUTES: tuple[tuple[str, str, Deed], ...] = (
    ("GET|HEAD", "/_ping", Calls.plain),
    ("GET", "/version", Calls.plain),
    ("GET", "/info", Calls.info),
    ("GET", "/labctl/gpus", Calls.gpus),
    ("GET", "/images/(.+)/json", Calls.image),
    ("DELETE", "/images/(.+)", Calls.drop_image),
    ("POST", "/images/create", Calls.pull),
    ("POST", "/images/load", Calls.load),
    ("GET", "/containers/json", Calls.listed),
    ("POST", "/containers/create", Calls.create),
    ("GET", "/containers/([^/]+)/json", Calls.inspect),
    ("GET", "/containers/([^/]+)/archive", Calls.archive),
    ("POST", "/containers/([^/]+)/start", Calls.start),
    ("POST", "/containers/([^/]+)/exec", Calls.exec),
    ("GET", "/containers/([^/]+)/(?:logs|stats|top)", Calls.own),
    ("POST", "/containers/([^/]+)/(?:stop|kill|wait|attach|resize)", Calls.own),
    ("DELETE", "/containers/([^/]+)", Calls.remove),
    ("GET", "/exec/([^/]+)/json", Calls.of_exec),
    ("POST", "/exec/([^/]+)/(?:start|resize)", Calls.of_exec),
)


def run(request: dict[str, Any]) -> None:
    """Serve until the end of the process. "settings" is the path of its file."""
    os.umask(0o022)
    settings = load(Path(str(request.get("settings") or "/etc/labctl/broker.json")))
    if os.geteuid() != 0:
        raise Failure("usage", "the broker runs as root")
    os.environ["DOCKER_HOST"] = engine.SOCKET
    engine.parse_with(parse_head)
    _many_files()
    mounts.begin()
    networks.fence()
    gpus = GpuReader()
    keeping = Keeping(settings, Claims(settings, GpuQueue(), gpus.read), _told)
    keeping.look()
    threading.Thread(target=_keep, args=(keeping,), daemon=True).start()
    Broker(settings, Calls(settings, keeping, gpus)).serve(Path(BROKER))


def _many_files() -> None:
    """Every connection of every account takes some; the usual 1024 are soon gone."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _keep(keeping: Keeping) -> None:
    while True:
        time.sleep(KEEP_EVERY_S)
        keeping.look()


class Broker:
    """Takes connections, says who is there, and finds the call that answers."""

    def __init__(self, settings: Settings, calls: Calls) -> None:
        self.settings = settings
        self.calls = calls
        self._busy: Counter[int] = Counter()
        self._guard = threading.Lock()
        self._routes = [
            (re.compile(methods), re.compile(path), deed) for methods, path, deed in ROUTES
        ]

    def serve(self, place: Path) -> None:
        # Whoever could write there could stand in for the broker.
        place.parent.chmod(0o755)
        with suppress(FileNotFoundError):
            place.unlink()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(place))
            os.chown(place, 0, grp.getgrnam(self.settings.group).gr_gid)
            place.chmod(0o660)
            listener.listen(128)
            _told(f"ready at {place}")
            while True:
                try:
                    link, _ = listener.accept()
                    self._let_in(link)
                except (OSError, RuntimeError) as error:  # too many files or threads
                    _told(f"a connection was not taken: {error}")
                    time.sleep(PAUSE_S)

    def _let_in(self, link: socket.socket) -> None:
        """A thread for it, unless the account has too many already: those cost no thread."""
        uid = networks.peer(link)[1]
        with self._guard:
            crowded = self._busy[uid] >= MOST_AT_ONCE
            self._busy[uid] += 0 if crowded else 1
        if crowded:
            with link, suppress(OSError):
                say(link, 429, {"message": f"more than {MOST_AT_ONCE} connections at once"})
            return
        try:
            threading.Thread(target=self._met, args=(link, uid), daemon=True).start()
        except RuntimeError:
            self._left(uid)
            link.close()
            raise

    def _left(self, uid: int) -> None:
        with self._guard:
            self._busy[uid] -= 1

    def _met(self, link: socket.socket, uid: int) -> None:
        try:
            with link, suppress(OSError):
                try:
                    asked = read_request(link)
                    if asked is not None:
                        self._answer(account_of(uid, self.settings.group), asked)
                except Refusal as refusal:
                    refuse(link, refusal)
        finally:
            self._left(uid)

    def _answer(self, account: Account, asked: Request) -> None:
        try:
            for methods, path, deed in self._routes:
                found = path.fullmatch(asked.path)
                if found and methods.fullmatch(asked.method):
                    deed(self.calls, account, asked, found.group(1) if path.groups else "")
                    return
        except engine.Refused as refused:
            raise Refusal(refused.status or 500, refused.message) from None
        except Failure as failure:
            raise Refusal(500, str(failure.body["what"])) from None
        except (Refusal, OSError):
            raise
        except Exception as error:  # an answer of the engine's that is not what it should be
            _told(f"{asked.method} {asked.path[:100]!a} failed: {describe_error(error)}")
            raise Refusal(500, "the Docker Engine gave an answer that cannot be read") from None
        raise Refusal(403, f"a shared server does not offer {asked.method} {asked.path[:100]}")


def account_of(uid: int, group: str) -> Account:
    """Who that is, as the machine's files say now: a process keeps the groups that it began with,
    and what an account has left running when it ended may start nothing any more."""
    try:
        found = pwd.getpwuid(uid)
        wanted = grp.getgrnam(group).gr_gid
    except KeyError:
        raise Refusal(403, f"uid {uid} is no account of this server") from None
    if wanted not in os.getgrouplist(found.pw_name, found.pw_gid):
        raise Refusal(403, f"{found.pw_name} is no account of this shared server any more")
    return Account(uid, found.pw_gid, found.pw_name, os.path.realpath(found.pw_dir))


def _told(text: str) -> None:
    sys.stderr.write(f"labctl-broker: {text}\n")
    sys.stderr.flush()
