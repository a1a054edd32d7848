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

from ...wire.codec import encode, to_json
from ..host import engine
from ..host.engine_objects import (
    Container,
    ExecState,
    Image,
    Mount,
    NewContainer,
    StartExec,
)
from ..host.paths import read_boottime_s, read_text
from . import account_images, cgroup, image_archive, networks, slurm_jobs
from . import mounts as broker_mounts
from .account_containers import list_containers
from .account_networks import AccountNetworks
from .claims import ContainerClaim
from .concurrency import AccountLimit
from .gpu_leases import GpuReader, find_holder, list_leases, list_node_groups
from .housekeeping import Housekeeping
from .http import UPLOAD_IDLE_S, HttpRefusal, LimitRefusal, Request, send_response
from .image_disk import ImageDisk
from .image_pulls import Pulls
from .query_filter import parse_filters, pick_parameters
from .relay import pass_on, send_on
from .request_fields import RequestFields
from .rules import (
    ENDS,
    GPUS,
    ID,
    JOB,
    NAME,
    OWNER,
    SOCKET,
    SOURCES,
    AccountShare,
    BindMount,
    BrokerAccount,
    build_container,
    build_own_name,
    build_volume_mounts,
    parse_container_request,
    parse_exec_request,
    strip_own_prefix,
)
from .settings import BrokerSettings
from .slurm_jobs import RunningJob

ENGINE = engine.SOCKET[len("unix://") :]
DRIVER = Path("/sys/module/nvidia/version")
INFO = ("ServerVersion", "NCPU", "MemTotal", "OperatingSystem", "Architecture", "Driver")
MOST_EXECS = 32  # in one container, including those that were created and never started
MOST_EXEC_BYTES = 64 * 1024
MOST_UPLOADS = 2  # of one account at once: each keeps part of its archive in memory for long


class Calls:
    """The handlers. Each takes the account, the request, and the reference in its path."""

    def __init__(self, settings: BrokerSettings, keeping: Housekeeping, gpus: GpuReader) -> None:
        self.settings = settings
        self.keeping = keeping
        self._gpus = gpus
        self._disk = ImageDisk(settings.disk_free_bytes)
        self._uploads = AccountLimit(MOST_UPLOADS, f"sends at most {MOST_UPLOADS} images")
        self._pulls = Pulls(settings.image_bytes, self._disk.require_room)
        self._networks = AccountNetworks()
        self._execs: dict[int, threading.Lock] = defaultdict(threading.Lock)

    def pass_plain(self, account: BrokerAccount, request: Request, _ref: str) -> None:
        pass_on(request, ENGINE, request.path, {})

    def send_info(self, account: BrokerAccount, request: Request, _ref: str) -> None:
        """Answer with the engine's public facts."""
        facts = json.loads(engine.call("GET", "/info"))
        public_facts = {key: facts.get(key) for key in INFO}
        runtimes = {name: {"path": ""} for name in facts.get("Runtimes") or {}}
        send_response(request.link, 200, {**public_facts, "Runtimes": runtimes})

    def send_gpus(self, account: BrokerAccount, request: Request, _ref: str) -> None:
        """Answer {"gpus": [...]}: each with its holder and the seconds left, or "" and 0."""
        leases_by_uuid = {lease.uuid: lease for lease in list_leases(list_containers())}
        now_s = read_boottime_s()
        rows = []
        for gpu in self._gpus.measure():
            row: dict[str, object] = to_json(gpu, drop_defaults=True)
            row["driver"] = read_text(DRIVER).split(" ")[0]
            lease = leases_by_uuid.get(gpu.uuid)
            row["holder"] = find_holder(lease.uid) if lease else ""
            row["ends_in_s"] = round(max(0.0, lease.ends_s - now_s)) if lease else 0
            rows.append(row)
        send_response(request.link, 200, {"gpus": rows})

    def send_image(self, account: BrokerAccount, request: Request, ref: str) -> None:
        send_response(request.link, 200, self._find_image_document(account, ref))

    def remove_image(self, account: BrokerAccount, request: Request, ref: str) -> None:
        """Remove an image of the account's own; shared images stay."""
        reference = account_images.build_own_reference(account, ref)
        pass_on(request, ENGINE, f"/images/{reference}", {})

    def pull(self, account: BrokerAccount, request: Request, _ref: str) -> None:
        """Pull from a registry, for all accounts, without the account's own logins."""
        reference = request.query.get("fromImage", "")
        account_images.build_own_reference(account, reference)
        if not reference or request.query.get("fromSrc"):
            raise HttpRefusal(403, "a shared server does not import images from URLs")
        tag = account_images.pick_tag(reference, request.query.get("tag", ""))
        mark = "@" if ":" in tag else ":"
        if account_images.is_installed_by_staff(
            engine.inspect_image(f"{reference}{mark}{tag}" if tag else reference)
        ):
            # Otherwise a registry name, which anybody may claim, would replace everybody's image.
            raise HttpRefusal(409, f"staff provides {reference[:200]} on this server already")
        self._pulls.pull(account, request.link, reference, tag)

    def load(self, account: BrokerAccount, request: Request, _ref: str) -> None:
        most = self.settings.image_bytes
        with self._uploads.hold(account), self._disk.count_upload() as claim:
            blocks = request.read_blocks(most, UPLOAD_IDLE_S)
            checked = image_archive.retag(account, blocks, most, claim)
            send_on(request, ENGINE, "/images/load", {"quiet": "1"}, checked)

    def list_containers_of(self, account: BrokerAccount, request: Request, _ref: str) -> None:
        filters = parse_filters(request.query.get("filters") or "{}")
        filters["label"] = [*filters.get("label", []), f"{OWNER}={account.uid}"]
        all_flag = "1" if request.query.get("all") in ("1", "true") else "0"
        text = quote(json.dumps(filters))
        containers = json.loads(
            engine.call("GET", f"/containers/json?all={all_flag}&filters={text}")
        )
        send_response(
            request.link, 200, [_describe_container(account, container) for container in containers]
        )

    def create(self, account: BrokerAccount, request: Request, _ref: str) -> None:
        fields = RequestFields(request.read_json_body())
        name = build_own_name(
            account, request.query.get("name") or f"anonymous-{os.urandom(6).hex()}"
        )
        wanted = parse_container_request(account, fields)
        job = self._find_job(account, request)
        share = slurm_jobs.read_share(job, self.settings.pids) if job else self.settings.share
        image = engine.convert_object(Image, self._find_image_document(account, wanted.image))
        gpus = self._choose_gpus(job, wanted.gpus) if job else wanted.gpus
        claim = ContainerClaim(name, gpus, "labctl.service" in wanted.labels, is_granted=bool(job))
        with self.keeping.claims.claim(account, claim) as grant:
            labels = {SOURCES: json.dumps({bind.target: bind.source for bind in wanted.binds})}
            if grant.gpus:
                labels.update({GPUS: ",".join(grant.gpus), ENDS: f"{grant.ends_s:.0f}"})
            if job:
                labels.update(slurm_jobs.list_labels(job))
            if wanted.port:
                labels[SOCKET] = str(networks.find_socket_path(account, name))
            memory = build_volume_mounts(image, wanted.binds, share)
            mounts = [*self._hold_mounts(account, name, wanted.binds), *memory]
            container = build_container(
                account,
                wanted,
                image=image.Id,
                mounts=mounts,
                gpus=grant.gpus,
                gpu_groups=list_node_groups() if grant.gpus else [],
                labels=labels,
                share=share,
                network=self._networks.ensure(account),
                parent=self._cgroup_parent(account, job, share),
            )
            reply = self._create_container(name, container)
        send_response(request.link, 201, reply)

    def inspect(self, account: BrokerAccount, request: Request, ref: str) -> None:
        document = self._find_own_document(account, ref)
        send_response(request.link, 200, _describe_container(account, document))

    def start(self, account: BrokerAccount, request: Request, ref: str) -> None:
        """Start a container, once: its staged mounts are released as soon as it runs."""
        container = self._inspect_own(account, ref)
        if container.State.Status not in ("created", "running"):
            raise HttpRefusal(409, "a container on a shared server can be started only once")
        self._require_job(account, container)
        with self._networks.hold(account):  # it may have been removed as unused since `create`
            if container.labels.get(JOB) and container.State.Status == "created":
                self._start_in_job(account, container)
            else:  # a client that repeats its request must not lose what runs
                engine.call("POST", f"/containers/{container.Id}/start")
        with self.keeping.claims.lock:
            broker_mounts.release(container.Name.lstrip("/"))
        with suppress(OSError):  # the account may have changed its own directory
            self.keeping.ensure_relay(container.Id, account.uid, container.labels)
        send_response(request.link, 200, b"")

    def exec(self, account: BrokerAccount, request: Request, ref: str) -> None:
        """Create an exec. The engine keeps one that is never started until the container ends."""
        command = parse_exec_request(account, RequestFields(request.read_json_body()))
        if len(json.dumps(to_json(command, drop_defaults=True))) > MOST_EXEC_BYTES:
            raise HttpRefusal(
                413, f"a command on a shared server has at most {MOST_EXEC_BYTES} bytes"
            )
        with self._execs[account.uid]:
            container = self._inspect_own(account, ref)
            self._require_job(account, container)
            if len(container.ExecIDs or ()) >= MOST_EXECS:
                message = f"a container runs at most {MOST_EXECS} commands at once"
                raise LimitRefusal(409, message)
            reply = json.loads(engine.call("POST", f"/containers/{container.Id}/exec", command))
        send_response(request.link, 201, reply)

    def send_passwd_file(self, account: BrokerAccount, request: Request, ref: str) -> None:
        """Send /etc/passwd of a container that has not run: a running one could swap links."""
        container = self._inspect_own(account, ref)
        if container.State.Status != "created" or request.query.get("path") != "/etc/passwd":
            raise HttpRefusal(403, "a shared server does not copy files out of containers")
        pass_on(request, ENGINE, f"/containers/{container.Id}/archive", {"path": "/etc/passwd"})

    def pass_to_container(self, account: BrokerAccount, request: Request, ref: str) -> None:
        """Pass on a request for which only the container's owner matters."""
        container = self._inspect_own(account, ref)
        action = request.path.rpartition("/")[2]
        query = pick_parameters(action, request.query)
        pass_on(request, ENGINE, f"/containers/{container.Id}/{action}", query)

    def remove(self, account: BrokerAccount, request: Request, ref: str) -> None:
        container = self._inspect_own(account, ref)
        # Its mounts are released later, by the housekeeping.
        engine.call("DELETE", f"/containers/{container.Id}?force=1&v=1")
        send_response(request.link, 200, b"")

    def pass_to_exec(self, account: BrokerAccount, request: Request, ref: str) -> None:
        if not ID.fullmatch(ref):
            raise HttpRefusal(404, f"No such exec instance: {ref[:80]}")
        state = engine.convert_object(
            ExecState, json.loads(engine.call("GET", f"/exec/{ref}/json"))
        )
        self._inspect_own(account, state.ContainerID)
        action = request.path.rpartition("/")[2]
        content = b""
        if action == "start":
            options = RequestFields(request.read_json_body())
            flags = StartExec(options.is_set("Detach"), options.is_set("Tty"))
            content = encode(flags).encode()
        query = pick_parameters(action, request.query)
        pass_on(request, ENGINE, f"/exec/{state.ID}/{action}", query, content)

    def _inspect_own(self, account: BrokerAccount, ref: str) -> Container:
        return engine.convert_object(Container, self._find_own_document(account, ref))

    def _find_own_document(self, account: BrokerAccount, ref: str) -> dict[str, Any]:
        """Inspect a container of the account; another account's container is not found."""
        if NAME.fullmatch(ref):
            for name in (f"u{account.uid}.{ref}", ref if ID.fullmatch(ref) else ""):
                container = engine.inspect_container_document(name) if name else None
                labels = (container or {}).get("Config", {}).get("Labels") or {}
                if container and labels.get(OWNER) == str(account.uid):
                    return container
        raise HttpRefusal(404, f"No such container: {ref[:120]}")

    def _find_image_document(self, account: BrokerAccount, ref: str) -> dict[str, Any]:
        for reference in account_images.list_candidates(account, ref):
            image = engine.inspect_image_document(reference)
            if image and account_images.is_visible(account, engine.convert_object(Image, image)):
                return image
        raise HttpRefusal(404, f"No such image: {ref[:200]}")

    def _hold_mounts(
        self, account: BrokerAccount, name: str, binds: list[BindMount]
    ) -> list[Mount]:
        if name in broker_mounts.list_held():
            if engine.inspect_containers([name]):
                raise HttpRefusal(409, f'The container name "{name}" is already in use')
            broker_mounts.release(name)
        return broker_mounts.bind_mounts(account, name, binds)

    def _create_container(self, name: str, container: NewContainer) -> object:
        """Create the container, and return the engine's reply."""
        try:
            reply: object = json.loads(
                engine.call("POST", f"/containers/create?name={name}", container)
            )
        except BaseException:
            broker_mounts.release(name)
            raise
        return reply

    def _find_job(self, account: BrokerAccount, request: Request) -> RunningJob | None:
        """Return the job that asks for a container; None on a server without Slurm."""
        if not self.settings.needs_job:
            return None
        return slurm_jobs.find_job(networks.read_peer(request.link)[0], account)

    def _require_job(self, account: BrokerAccount, container: Container) -> None:
        needs_job = self.settings.needs_job
        slurm_jobs.require_running(container.labels, account, needs_job=needs_job)

    def _start_in_job(self, account: BrokerAccount, container: Container) -> None:
        """Start a container, and remove it unless it certainly runs in its job.

        After an error of the engine, too: it may have started the container nevertheless.
        """
        parent = container.HostConfig.CgroupParent
        inodes = slurm_jobs.prepare_start(parent)
        try:
            engine.call("POST", f"/containers/{container.Id}/start")
            self._require_job(account, container)
            slurm_jobs.require_same_group(parent, inodes)
        except BaseException:
            engine.remove_container(container.Id)
            cgroup.remove_new(parent, inodes)
            raise

    def _choose_gpus(self, job: RunningJob, wanted: list[str]) -> list[str]:
        return slurm_jobs.choose_gpus(job, wanted, self._gpus.identify() if wanted else [])

    def _cgroup_parent(
        self, account: BrokerAccount, job: RunningJob | None, share: AccountShare
    ) -> str:
        driver = json.loads(engine.call("GET", "/info")).get("CgroupDriver", "")
        if job:
            return slurm_jobs.set_job_limits(job, share, driver)
        return cgroup.set_account_limits(account.uid, self.settings.share, driver)


def _describe_container(account: BrokerAccount, container: dict[str, Any]) -> dict[str, Any]:
    """Describe a container with the account's own names and mount sources."""
    labels = dict((container.get("Config") or {}).get("Labels") or container.get("Labels") or {})
    sources = json.loads(labels.pop(SOURCES, "{}"))
    described = dict(container)
    if "Name" in container:
        described["Name"] = strip_own_prefix(account, container["Name"])
        described["Config"] = {**container["Config"], "Labels": labels}
    else:
        described["Names"] = [
            strip_own_prefix(account, entry) for entry in container.get("Names") or []
        ]
        described["Labels"] = labels
    described["Mounts"] = [
        {
            **entry,
            "Source": sources.get(entry.get("Destination"), entry.get("Source", "")),
        }
        for entry in container.get("Mounts") or []
    ]
    return described
