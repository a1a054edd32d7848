"""Create a server: one insert with a request id, after everything that it needs exists."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

from labctl.errors import BusyError, CapacityError, LabError, ProviderError, UsageError
from labctl.model import GIB, CreateServerRequest, Offer, Server
from labctl.providers.gcp import hardware, images, instances, labels, network, permissions
from labctl.providers.gcp.clients import GcpClients
from labctl.providers.gcp.errors import EXISTS, get_reasons, make_operation_error
from labctl.providers.gcp.labels import ServerRecord
from labctl.providers.gcp.replies import GceImage, GceOperation, decode_reply
from labctl.providers.gcp.run_limit import compute_run_limit_s
from labctl.providers.gcp.settings import GcpSettings

# Google's limit of one value of an instance's metadata.
USER_DATA_BYTES = 256 * 1024
# seconds for which firewall rules are taken to exist: another process may remove them, and Google
# creates a server without them, too
RULES_S = 60.0


class GcpLauncher:
    """Creates servers. Caches what they need, so that thirty servers query it only once."""

    def __init__(self, clients: GcpClients, settings: GcpSettings, owner: str) -> None:
        self._clients = clients
        self._settings = settings
        self._owner = owner
        self._lock = threading.Lock()
        self._images: dict[str, GceImage] = {}
        self._groups: dict[tuple[str, bool], float] = {}

    def create(self, offer: Offer, request: CreateServerRequest) -> Server:
        """Create the server of this attempt; the same offer and request return the same server.

        CapacityError: the token's server has ended, or Google has no capacity for it. Google says
        so only some seconds after it has accepted the request, so this waits for it.
        """
        if len(request.first_boot.encode()) > USER_DATA_BYTES:
            raise UsageError("the first-boot script is larger than the 256 KB that Google accepts")
        record = labels.make_record(offer, request, self._owner)
        image = self._ensure_parts(offer, request, record)
        name = labels.make_server_name(request)
        server_id = labels.make_server_id(name, offer.zone)
        resource = self._build_instance(request, record, name, image)
        operation = self._insert(offer, request, resource)
        try:
            if operation is not None:
                operation = instances.finish_operation(self._clients, operation, offer.zone)
            instance = instances.find_instance(self._clients, server_id)
        except LabError as error:
            # Google has accepted the request: no refusal of these calls means that it created none.
            raise BusyError(
                f"Google has not said whether it created {server_id}",
                why=error.what,
                hint=error.next_step,
            ) from error
        if operation is not None:
            self._require_created(offer, operation)
        if instance is None and (operation is None or operation.status == "DONE"):
            raise CapacityError(
                "the server of this attempt has already ended",
                why=f"Google does not list {server_id} any more",
                hint=lambda subject: f"{subject.up}   # again",
            )
        if instance is None:
            raise BusyError(
                "Google does not list the new server yet",
                why=server_id,
                hint="run the same command again in a minute",
            )
        server = labels.parse_server(instance, self._clients.project, self._settings.user)
        return labels.with_identity(server, request.identity)

    def forget_rules(self) -> None:
        """Look for firewall rules again before the next server, because one was removed."""
        self._groups.clear()

    def _insert(
        self, offer: Offer, request: CreateServerRequest, resource: Any
    ) -> GceOperation | None:
        """Send the request; None if the server exists already."""
        try:
            message = self._clients.call(
                "instances",
                "insert_unary",
                permissions.CREATE,
                zone=offer.zone,
                request_id=labels.make_request_id(request.token, offer.zone),
                instance_resource=resource,
            )
        except LabError as error:
            cause: Any = error.__cause__
            if hasattr(cause, "errors") and get_reasons(cause) & EXISTS:
                return None
            if type(error) is ProviderError:
                # A definite refusal: nothing was created, and the next one would be the same.
                raise UsageError(
                    f"Google refused {offer.type} in {offer.zone}",
                    why=error.why,
                    hint="labctl config   # shows the settings of server.gcp",
                ) from error
            raise
        return decode_reply(message, GceOperation)

    def _require_created(self, offer: Offer, done: GceOperation) -> None:
        """Raise what Google says instead of having room; a machine that exists counts as room."""
        if any(problem.code in EXISTS for problem in done.error.errors):
            return
        market = "spot" if offer.spot else "on-demand"
        what = f"{offer.type} ({market}) in {offer.zone}"
        if error := make_operation_error(done, what, permissions.CREATE):
            raise error

    def _ensure_parts(
        self, offer: Offer, request: CreateServerRequest, record: ServerRecord
    ) -> GceImage:
        """Find the image, and create the firewall rules that are missing."""
        group, gang = network.find_group(record), bool(request.gang)
        with self._lock:
            # Nothing is created before the image to boot is known to exist.
            found = self._find_image(offer)
            checked_at = self._groups.get((group.id, gang), 0.0)
            if time.monotonic() - checked_at > RULES_S:
                network.ensure_rules(self._clients, self._settings, group, self._owner, gang=gang)
                self._groups[group.id, gang] = time.monotonic()
            return found

    def _find_image(self, offer: Offer) -> GceImage:
        chosen = images.choose_image(self._settings, offer)
        if chosen not in self._images:
            self._images[chosen] = images.find_image(self._clients, self._settings, offer)
        return self._images[chosen]

    def _build_instance(
        self, request: CreateServerRequest, record: ServerRecord, name: str, image: GceImage
    ) -> Any:
        """Build the whole request, only from the offer, the request and settings."""
        types, offer = self._clients.types, record.offer
        zone = offer.zone
        lab_labels = labels.make_labels(request, self._owner)
        instance = types.Instance(
            name=name,
            machine_type=f"zones/{zone}/machineTypes/{offer.type}",
            labels=lab_labels,
            tags=types.Tags(items=[network.find_group(record).tag]),
            metadata=self._build_metadata(request, record),
            disks=[self._build_disk(offer, image, lab_labels)],
            network_interfaces=[self._build_interface(offer)],
            scheduling=self._build_scheduling(offer, request),
        )
        if accelerator := hardware.get_accelerator(offer):
            instance.guest_accelerators = [
                types.AcceleratorConfig(
                    accelerator_type=f"zones/{zone}/acceleratorTypes/{accelerator}",
                    accelerator_count=offer.gpu_count,
                )
            ]
        return instance

    def _build_metadata(self, request: CreateServerRequest, record: ServerRecord) -> Any:
        values = {
            labels.RECORD: labels.encode_record(record),
            # Only labctl's key logs in, whatever the project's settings say.
            "block-project-ssh-keys": "TRUE",
            "enable-oslogin": "FALSE",
        }
        if request.first_boot:
            values[labels.USER_DATA] = request.first_boot
        types = self._clients.types
        return types.Metadata(
            items=[types.Items(key=key, value=value) for key, value in values.items()]
        )

    def _build_disk(self, offer: Offer, image: GceImage, disk_labels: dict[str, str]) -> Any:
        types = self._clients.types
        gib = max(math.ceil(self._settings.disk_bytes / GIB), int(image.disk_size_gb))
        disk_type = hardware.get_disk_type(offer.type)
        return types.AttachedDisk(
            boot=True,
            auto_delete=True,
            device_name="boot",
            initialize_params=types.AttachedDiskInitializeParams(
                source_image=image.self_link,
                disk_size_gb=gib,
                disk_type=f"zones/{offer.zone}/diskTypes/{disk_type}",
                labels=disk_labels,
            ),
        )

    def _build_interface(self, offer: Offer) -> Any:
        types = self._clients.types
        interface = types.NetworkInterface(
            network=network.get_network_path(self._clients, self._settings),
            access_configs=[types.AccessConfig(name="External NAT", type_="ONE_TO_ONE_NAT")],
        )
        if self._settings.subnet:
            project, _, name = self._settings.subnet.rpartition("/")
            interface.subnetwork = (
                f"projects/{project or self._clients.project}/regions/{offer.region}"
                f"/subnetworks/{name}"
            )
        return interface

    def _build_scheduling(self, offer: Offer, request: CreateServerRequest) -> Any:
        """Build what ends the machine: Google's own timer, and the reclaim of a spot machine."""
        types = self._clients.types
        scheduling = types.Scheduling(
            # A machine with a GPU cannot be moved to another host.
            on_host_maintenance="TERMINATE" if offer.gpu_count or offer.spot else "MIGRATE",
            automatic_restart=False,
            provisioning_model="SPOT" if offer.spot else "STANDARD",
        )
        run_limit_s = compute_run_limit_s(request.need, offer.price_usd_per_hour)
        if run_limit_s is not None:
            scheduling.max_run_duration = types.Duration(seconds=run_limit_s)
        if offer.spot or run_limit_s is not None:
            scheduling.instance_termination_action = "DELETE"
        return scheduling
