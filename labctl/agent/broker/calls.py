"""The calls that an account may make, each with the account's own things only."""

from __future__ import annotations

import json
import os
import threading
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..host import engine
from ..host.paths import read_text
from . import account_images, cgroup, image_archive, networks
from . import mounts as broker_mounts
from .account_containers import list_containers
from .claims import ContainerClaim
from .concurrency import AccountLimit
from .detection import TAKEN
from .gpu_leases import GpuReader, boottime_s, holder, leases, node_groups
from .housekeeping import Keeping
from .http import UPLOAD_IDLE_S, Refusal, Request, say
from .image_disk import ImageDisk
from .image_pulls import Pulls
from .query_filter import parse_filters, pick_parameters
from .relay import pass_on, send_on
from .rules import (
    ENDS,
    GPUS,
    ID,
    NAME,
    OWNER,
    SOCKET,
    SOURCES,
    Account,
    body,
    covers,
    exec_body,
    labels_of,
    own_name,
    shown_name,
    wish,
)
from .settings import Settings

ENGINE = engine.SOCKET[len("unix://") :]
DRIVER = Path("/sys/module/nvidia/version")
INFO = ("ServerVersion", "NCPU", "MemTotal", "OperatingSystem", "Architecture", "Driver")
MOST_EXECS = 32  # in one container at once, those that were made and never started among them
MOST_EXEC_BYTES = 64 * 1024
MOST_UPLOADS = 2  # of one account at once: each holds some of its archive in memory, and for long


class Calls:
    """Each takes who asks, the request, and what its path names."""

    def __init__(self, settings: Settings, keeping: Keeping, gpus: GpuReader) -> None:
        self.settings = settings
        self.keeping = keeping
        self._gpus = gpus
        self._disk = ImageDisk(settings.disk_free_bytes)
        self._uploads = AccountLimit(MOST_UPLOADS, f"sends at most {MOST_UPLOADS} images")
        self._pulls = Pulls(settings.image_bytes, self._disk.require_room)
        self._execs: dict[int, threading.Lock] = defaultdict(threading.Lock)

    def plain(self, account: Account, asked: Request, _ref: str) -> None:
        pass_on(asked, ENGINE, asked.path, {})

    def info(self, account: Account, asked: Request, _ref: str) -> None:
        """Of the engine what anybody may know."""
        found = json.loads(engine.ask("GET", "/info"))
        told = {key: found.get(key) for key in INFO}
        runtimes = {name: {"path": ""} for name in found.get("Runtimes") or {}}
        say(asked.link, 200, {**told, "Runtimes": runtimes})

    def gpus(self, account: Account, asked: Request, _ref: str) -> None:
        """{"gpus": [...]}: each with its holder's name and the seconds until the end, or free."""
        held = {one.uuid: one for one in leases(list_containers())}
        now_s = boottime_s()
        told = []
        for gpu in self._gpus.read():
            row = dict(gpu)
            row["driver"] = read_text(DRIVER).split(" ")[0]
            lease = held.get(str(gpu.get("uuid")))
            row["holder"] = holder(lease.uid) if lease else ""
            row["ends_in_s"] = round(max(0.0, lease.ends_s - now_s)) if lease else 0
            told.append(row)
        say(asked.link, 200, {"gpus": told})

    def image(self, account: Account, asked: Request, ref: str) -> None:
        say(asked.link, 200, self._image(account, ref))

    def drop_image(self, account: Account, asked: Request, ref: str) -> None:
        """One of the account's own; what is there for all stays."""
        own = account_images.own_reference(account, ref)
        pass_on(asked, ENGINE, f"/images/{own}", {})

    def pull(self, account: Account, asked: Request, _ref: str) -> None:
        """From a registry, for all. The account's own logins are not used."""
        reference = asked.query.get("fromImage", "")
        account_images.own_reference(account, reference)
        if not reference or asked.query.get("fromSrc"):
            raise Refusal(403, "a shared server makes no images of archives")
        tag = account_images.tag_of(reference, asked.query.get("tag", ""))
        mark = "@" if ":" in tag else ":"
        if account_images.given(engine.image(f"{reference}{mark}{tag}" if tag else reference)):
            # Else a name at a registry, which anybody may take, would be everybody's image here.
            raise Refusal(409, f"{reference[:200]} is here already, as staff has given it")
        self._pulls.pull(account, asked.link, reference, tag)

    def load(self, account: Account, asked: Request, _ref: str) -> None:
        most = self.settings.image_bytes
        with self._uploads.hold(account), self._disk.count_upload() as claim:
            blocks = asked.blocks(most, UPLOAD_IDLE_S)
            checked = image_archive.retagged(account, blocks, most, claim)
            send_on(asked, ENGINE, "/images/load", {"quiet": "1"}, checked)

    def listed(self, account: Account, asked: Request, _ref: str) -> None:
        filters = parse_filters(asked.query.get("filters") or "{}")
        filters["label"] = [*filters.get("label", []), f"{OWNER}={account.uid}"]
        every = "1" if asked.query.get("all") in ("1", "true") else "0"
        text = quote(json.dumps(filters))
        found = json.loads(engine.ask("GET", f"/containers/json?all={every}&filters={text}"))
        say(asked.link, 200, [_shown(account, one) for one in found])

    def create(self, account: Account, asked: Request, _ref: str) -> None:
        wanted = asked.json()
        name = own_name(account, asked.query.get("name") or f"anonymous-{os.urandom(6).hex()}")
        found = self._image(account, str(wanted.get("Image") or ""))
        asks = wish(account, wanted)
        request = ContainerClaim(name, asks.gpus, "labctl.service" in labels_of(wanted))
        with self.keeping.claims.claim(account, request) as grant:
            labels = {SOURCES: json.dumps({one.target: one.source for one in asks.binds})}
            if grant.gpus:
                labels.update({GPUS: ",".join(grant.gpus), ENDS: f"{grant.ends_s:.0f}"})
            if asks.port:
                labels[SOCKET] = str(networks.socket_of(account, name))
            memory = covers(found, asks.binds, self.settings.share)
            mounts = [*self._held(account, name, asks.binds), *memory]
            made = body(
                account,
                wanted,
                image=found["Id"],
                mounts=mounts,
                gpus=grant.gpus,
                gpu_groups=node_groups() if grant.gpus else [],
                labels=labels,
                share=self.settings.share,
                network=networks.network(account),
                parent=self._parent(account),
            )
            said = self._made(name, made)
        say(asked.link, 201, said)

    def inspect(self, account: Account, asked: Request, ref: str) -> None:
        say(asked.link, 200, _shown(account, self._own(account, ref)))

    def start(self, account: Account, asked: Request, ref: str) -> None:
        """Once: what it mounts is let go as soon as it has it."""
        found = self._own(account, ref)
        if found["State"]["Status"] not in ("created", "running"):
            raise Refusal(409, "a container on a shared server is started once")
        engine.ask("POST", f"/containers/{found['Id']}/start")
        with self.keeping.claims.lock:
            broker_mounts.release(found["Name"].lstrip("/"))
        with suppress(OSError):  # what the account has done to its own directory
            self.keeping.relay(found["Id"], account.uid, found["Config"]["Labels"])
        say(asked.link, 200, b"")

    def exec(self, account: Account, asked: Request, ref: str) -> None:
        """The engine keeps what was never started for as long as the container is there."""
        made = exec_body(account, asked.json())
        if len(json.dumps(made)) > MOST_EXEC_BYTES:
            raise Refusal(413, f"a command on a shared server has at most {MOST_EXEC_BYTES} bytes")
        with self._execs[account.uid]:
            found = self._own(account, ref)
            if len(found.get("ExecIDs") or []) >= MOST_EXECS:
                said = f"{TAKEN}at most {MOST_EXECS} commands at once in one container"
                raise Refusal(409, said)
            said = json.loads(engine.ask("POST", f"/containers/{found['Id']}/exec", made))
        say(asked.link, 201, said)

    def archive(self, account: Account, asked: Request, ref: str) -> None:
        """Only /etc/passwd, only where nothing has run yet: what runs could move links about."""
        found = self._own(account, ref)
        if found["State"]["Status"] != "created" or asked.query.get("path") != "/etc/passwd":
            raise Refusal(403, "a shared server copies nothing out of containers")
        pass_on(asked, ENGINE, f"/containers/{found['Id']}/archive", {"path": "/etc/passwd"})

    def own(self, account: Account, asked: Request, ref: str) -> None:
        """Whatever needs no look at the request beyond whose container it is."""
        found = self._own(account, ref)
        deed = asked.path.rpartition("/")[2]
        query = pick_parameters(deed, asked.query)
        pass_on(asked, ENGINE, f"/containers/{found['Id']}/{deed}", query)

    def remove(self, account: Account, asked: Request, ref: str) -> None:
        found = self._own(account, ref)
        # What it mounts is let go at the next look: by then another of this name may be made.
        engine.ask("DELETE", f"/containers/{found['Id']}?force=1&v=1")
        say(asked.link, 200, b"")

    def of_exec(self, account: Account, asked: Request, ref: str) -> None:
        if not ID.fullmatch(ref):
            raise Refusal(404, f"No such exec instance: {ref[:80]}")
        said = json.loads(engine.ask("GET", f"/exec/{ref}/json"))
        self._own(account, str(said.get("ContainerID")))
        deed = asked.path.rpartition("/")[2]
        content = b""
        if deed == "start":
            wanted = asked.json()
            told = {key: bool(wanted.get(key)) for key in ("Detach", "Tty")}
            content = json.dumps(told).encode()
        query = pick_parameters(deed, asked.query)
        pass_on(asked, ENGINE, f"/exec/{said['ID']}/{deed}", query, content)

    def _own(self, account: Account, ref: str) -> dict[str, Any]:
        """What `inspect` says of a container of the account's; another's is not found."""
        if NAME.fullmatch(ref):
            for known in (f"u{account.uid}.{ref}", ref if ID.fullmatch(ref) else ""):
                found = next(iter(engine.inspect([known]).values()), None) if known else None
                labels = (found or {}).get("Config", {}).get("Labels") or {}
                if found and labels.get(OWNER) == str(account.uid):
                    return found
        raise Refusal(404, f"No such container: {ref[:120]}")

    def _image(self, account: Account, ref: str) -> dict[str, Any]:
        for known in account_images.candidates(account, ref):
            found = engine.image(known)
            if found and account_images.visible(account, found):
                return found
        raise Refusal(404, f"No such image: {ref[:200]}")

    def _held(self, account: Account, name: str, binds: list[Any]) -> list[dict[str, Any]]:
        if name in broker_mounts.held():
            if engine.inspect([name]):
                raise Refusal(409, f'The container name "{name}" is already in use')
            broker_mounts.release(name)
        return broker_mounts.hold(account, name, binds)

    def _made(self, name: str, made: dict[str, Any]) -> dict[str, Any]:
        try:
            said: dict[str, Any] = json.loads(
                engine.ask("POST", f"/containers/create?name={name}", made)
            )
        except BaseException:
            broker_mounts.release(name)
            raise
        return said

    def _parent(self, account: Account) -> str:
        driver = json.loads(engine.ask("GET", "/info")).get("CgroupDriver", "")
        return cgroup.parent_of(account.uid, self.settings.share, driver)


def _shown(account: Account, found: dict[str, Any]) -> dict[str, Any]:
    """A container as the account knows it: by its own names, mounted from its own places."""
    labels = dict((found.get("Config") or {}).get("Labels") or found.get("Labels") or {})
    sources = json.loads(labels.pop(SOURCES, "{}"))
    told = dict(found)
    if "Name" in found:
        told["Name"] = shown_name(account, found["Name"])
        told["Config"] = {**found["Config"], "Labels": labels}
    else:
        told["Names"] = [shown_name(account, one) for one in found.get("Names") or []]
        told["Labels"] = labels
    told["Mounts"] = [
        {**one, "Source": sources.get(one.get("Destination"), one.get("Source", ""))}
        for one in found.get("Mounts") or []
    ]
    return told
