"""The API calls that an account may make, each limited to the account's own objects."""

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
MOST_EXECS = 32  # in one container, including those that were created and never started
MOST_EXEC_BYTES = 64 * 1024
MOST_UPLOADS = 2  # of one account at once: each keeps part of its archive in memory for long


class Calls:
    """The handlers. Each takes the account, the request, and the reference in its path."""

    def __init__(self, settings: Settings, keeping: Keeping, gpus: GpuReader) -> None:
        self.settings = settings
        self.keeping = keeping
        self._gpus = gpus
        self._disk = ImageDisk(settings.disk_free_bytes)
        self._uploads = AccountLimit(MOST_UPLOADS, f"sends at most {MOST_UPLOADS} images")
        self._pulls = Pulls(settings.image_bytes, self._disk.require_room)
        self._execs: dict[int, threading.Lock] = defaultdict(threading.Lock)

    def plain(self, account: Account, request: Request, _ref: str) -> None:
        pass_on(request, ENGINE, request.path, {})

    def info(self, account: Account, request: Request, _ref: str) -> None:
        """Answer with the engine's public facts."""
        facts = json.loads(engine.ask("GET", "/info"))
        public_facts = {key: facts.get(key) for key in INFO}
        runtimes = {name: {"path": ""} for name in facts.get("Runtimes") or {}}
        say(request.link, 200, {**public_facts, "Runtimes": runtimes})

    def gpus(self, account: Account, request: Request, _ref: str) -> None:
        """Answer {"gpus": [...]}: each with its holder and the seconds left, or "" and 0."""
        leases_by_uuid = {lease.uuid: lease for lease in leases(list_containers())}
        now_s = boottime_s()
        rows = []
        for gpu in self._gpus.read():
            row = dict(gpu)
            row["driver"] = read_text(DRIVER).split(" ")[0]
            lease = leases_by_uuid.get(str(gpu.get("uuid")))
            row["holder"] = holder(lease.uid) if lease else ""
            row["ends_in_s"] = round(max(0.0, lease.ends_s - now_s)) if lease else 0
            rows.append(row)
        say(request.link, 200, {"gpus": rows})

    def image(self, account: Account, request: Request, ref: str) -> None:
        say(request.link, 200, self._find_image(account, ref))

    def drop_image(self, account: Account, request: Request, ref: str) -> None:
        """Remove an image of the account's own; shared images stay."""
        own = account_images.own_reference(account, ref)
        pass_on(request, ENGINE, f"/images/{own}", {})

    def pull(self, account: Account, request: Request, _ref: str) -> None:
        """Pull from a registry, for all accounts, without the account's own logins."""
        reference = request.query.get("fromImage", "")
        account_images.own_reference(account, reference)
        if not reference or request.query.get("fromSrc"):
            raise Refusal(403, "a shared server does not import images from URLs")
        tag = account_images.tag_of(reference, request.query.get("tag", ""))
        mark = "@" if ":" in tag else ":"
        if account_images.given(engine.image(f"{reference}{mark}{tag}" if tag else reference)):
            # Otherwise a registry name, which anybody may claim, would replace everybody's image.
            raise Refusal(409, f"staff provides {reference[:200]} on this server already")
        self._pulls.pull(account, request.link, reference, tag)

    def load(self, account: Account, request: Request, _ref: str) -> None:
        most = self.settings.image_bytes
        with self._uploads.hold(account), self._disk.count_upload() as claim:
            blocks = request.blocks(most, UPLOAD_IDLE_S)
            checked = image_archive.retagged(account, blocks, most, claim)
            send_on(request, ENGINE, "/images/load", {"quiet": "1"}, checked)

    def listed(self, account: Account, request: Request, _ref: str) -> None:
        filters = parse_filters(request.query.get("filters") or "{}")
        filters["label"] = [*filters.get("label", []), f"{OWNER}={account.uid}"]
        all_flag = "1" if request.query.get("all") in ("1", "true") else "0"
        text = quote(json.dumps(filters))
        containers = json.loads(
            engine.ask("GET", f"/containers/json?all={all_flag}&filters={text}")
        )
        say(
            request.link, 200, [_describe_container(account, container) for container in containers]
        )

    def create(self, account: Account, request: Request, _ref: str) -> None:
        spec = request.json()
        name = own_name(account, request.query.get("name") or f"anonymous-{os.urandom(6).hex()}")
        image = self._find_image(account, str(spec.get("Image") or ""))
        parsed = wish(account, spec)
        claim_request = ContainerClaim(name, parsed.gpus, "labctl.service" in labels_of(spec))
        with self.keeping.claims.claim(account, claim_request) as grant:
            labels = {SOURCES: json.dumps({one.target: one.source for one in parsed.binds})}
            if grant.gpus:
                labels.update({GPUS: ",".join(grant.gpus), ENDS: f"{grant.ends_s:.0f}"})
            if parsed.port:
                labels[SOCKET] = str(networks.socket_of(account, name))
            memory = covers(image, parsed.binds, self.settings.share)
            mounts = [*self._hold_mounts(account, name, parsed.binds), *memory]
            container_body = body(
                account,
                spec,
                image=image["Id"],
                mounts=mounts,
                gpus=grant.gpus,
                gpu_groups=node_groups() if grant.gpus else [],
                labels=labels,
                share=self.settings.share,
                network=networks.network(account),
                parent=self._cgroup_parent(account),
            )
            reply = self._create_container(name, container_body)
        say(request.link, 201, reply)

    def inspect(self, account: Account, request: Request, ref: str) -> None:
        say(request.link, 200, _describe_container(account, self._inspect_own(account, ref)))

    def start(self, account: Account, request: Request, ref: str) -> None:
        """Start a container, once: its staged mounts are released as soon as it runs."""
        container = self._inspect_own(account, ref)
        if container["State"]["Status"] not in ("created", "running"):
            raise Refusal(409, "a container on a shared server can be started only once")
        engine.ask("POST", f"/containers/{container['Id']}/start")
        with self.keeping.claims.lock:
            broker_mounts.release(container["Name"].lstrip("/"))
        with suppress(OSError):  # the account may have changed its own directory
            self.keeping.relay(container["Id"], account.uid, container["Config"]["Labels"])
        say(request.link, 200, b"")

    def exec(self, account: Account, request: Request, ref: str) -> None:
        """Create an exec. The engine keeps one that is never started until the container ends."""
        spec = exec_body(account, request.json())
        if len(json.dumps(spec)) > MOST_EXEC_BYTES:
            raise Refusal(413, f"a command on a shared server has at most {MOST_EXEC_BYTES} bytes")
        with self._execs[account.uid]:
            container = self._inspect_own(account, ref)
            if len(container.get("ExecIDs") or []) >= MOST_EXECS:
                message = f"{TAKEN}a container runs at most {MOST_EXECS} commands at once"
                raise Refusal(409, message)
            reply = json.loads(engine.ask("POST", f"/containers/{container['Id']}/exec", spec))
        say(request.link, 201, reply)

    def archive(self, account: Account, request: Request, ref: str) -> None:
        """Send /etc/passwd of a container that has not run: a running one could swap links."""
        container = self._inspect_own(account, ref)
        if container["State"]["Status"] != "created" or request.query.get("path") != "/etc/passwd":
            raise Refusal(403, "a shared server does not copy files out of containers")
        pass_on(request, ENGINE, f"/containers/{container['Id']}/archive", {"path": "/etc/passwd"})

    def own(self, account: Account, request: Request, ref: str) -> None:
        """Pass on a request for which only the container's owner matters."""
        container = self._inspect_own(account, ref)
        action = request.path.rpartition("/")[2]
        query = pick_parameters(action, request.query)
        pass_on(request, ENGINE, f"/containers/{container['Id']}/{action}", query)

    def remove(self, account: Account, request: Request, ref: str) -> None:
        container = self._inspect_own(account, ref)
        # Its mounts are released later, by the housekeeping.
        engine.ask("DELETE", f"/containers/{container['Id']}?force=1&v=1")
        say(request.link, 200, b"")

    def of_exec(self, account: Account, request: Request, ref: str) -> None:
        if not ID.fullmatch(ref):
            raise Refusal(404, f"No such exec instance: {ref[:80]}")
        exec_record = json.loads(engine.ask("GET", f"/exec/{ref}/json"))
        self._inspect_own(account, str(exec_record.get("ContainerID")))
        action = request.path.rpartition("/")[2]
        content = b""
        if action == "start":
            options = request.json()
            flags = {key: bool(options.get(key)) for key in ("Detach", "Tty")}
            content = json.dumps(flags).encode()
        query = pick_parameters(action, request.query)
        pass_on(request, ENGINE, f"/exec/{exec_record['ID']}/{action}", query, content)

    def _inspect_own(self, account: Account, ref: str) -> dict[str, Any]:
        """Inspect a container of the account; another account's container is not found."""
        if NAME.fullmatch(ref):
            for name in (f"u{account.uid}.{ref}", ref if ID.fullmatch(ref) else ""):
                container = next(iter(engine.inspect([name]).values()), None) if name else None
                labels = (container or {}).get("Config", {}).get("Labels") or {}
                if container and labels.get(OWNER) == str(account.uid):
                    return container
        raise Refusal(404, f"No such container: {ref[:120]}")

    def _find_image(self, account: Account, ref: str) -> dict[str, Any]:
        for reference in account_images.candidates(account, ref):
            image = engine.image(reference)
            if image and account_images.visible(account, image):
                return image
        raise Refusal(404, f"No such image: {ref[:200]}")

    def _hold_mounts(self, account: Account, name: str, binds: list[Any]) -> list[dict[str, Any]]:
        if name in broker_mounts.held():
            if engine.inspect([name]):
                raise Refusal(409, f'The container name "{name}" is already in use')
            broker_mounts.release(name)
        return broker_mounts.hold(account, name, binds)

    def _create_container(self, name: str, container_body: dict[str, Any]) -> dict[str, Any]:
        try:
            reply: dict[str, Any] = json.loads(
                engine.ask("POST", f"/containers/create?name={name}", container_body)
            )
        except BaseException:
            broker_mounts.release(name)
            raise
        return reply

    def _cgroup_parent(self, account: Account) -> str:
        driver = json.loads(engine.ask("GET", "/info")).get("CgroupDriver", "")
        return cgroup.parent_of(account.uid, self.settings.share, driver)


def _describe_container(account: Account, container: dict[str, Any]) -> dict[str, Any]:
    """Describe a container with the account's own names and mount sources."""
    labels = dict((container.get("Config") or {}).get("Labels") or container.get("Labels") or {})
    sources = json.loads(labels.pop(SOURCES, "{}"))
    described = dict(container)
    if "Name" in container:
        described["Name"] = shown_name(account, container["Name"])
        described["Config"] = {**container["Config"], "Labels": labels}
    else:
        described["Names"] = [shown_name(account, entry) for entry in container.get("Names") or []]
        described["Labels"] = labels
    described["Mounts"] = [
        {
            **entry,
            "Source": sources.get(entry.get("Destination"), entry.get("Source", "")),
        }
        for entry in container.get("Mounts") or []
    ]
    return described
