"""Create a server: address, interface and machine, each by a PUT with a name from the token."""

from __future__ import annotations

import base64
import math
import threading
from contextlib import suppress

import msgspec

from labctl.errors import (
    BusyError,
    CapacityError,
    LabError,
    ProviderError,
    ThrottledError,
    UsageError,
)
from labctl.model import GIB, CreateServerRequest, Offer, Server
from labctl.providers.azure import bodies, machines, network, permissions, tags
from labctl.providers.azure.arm import Arm
from labctl.providers.azure.leftovers import delete_part
from labctl.providers.azure.network import NetworkGroup
from labctl.providers.azure.replies import ResourceRef
from labctl.providers.azure.settings import AzureSettings
from labctl.providers.azure.tags import AzureRecord

# Azure's limit of a machine's custom data, before base64.
USER_DATA_BYTES = 65_535
DISK_TYPE = "StandardSSD_LRS"
GPU_IMAGE = "microsoft-dsvm:ubuntu-hpc:2204:latest"
PLAIN_IMAGE = "Canonical:ubuntu-24_04-lts:server:latest"
LONGEST_HOSTNAME = 63


class AzureLauncher:
    """Creates servers. Remembers which networks exist, so that thirty servers query them once."""

    def __init__(self, arm: Arm, settings: AzureSettings, owner: str) -> None:
        self._arm = arm
        self._settings = settings
        self._owner = owner
        self._lock = threading.Lock()
        self._networks: set[tuple[NetworkGroup, bool]] = set()

    def create(self, offer: Offer, request: CreateServerRequest) -> Server:
        """Create the server of this attempt; the same offer and request return the same server.

        CapacityError: Azure has no room, or no quota in this region. Azure may say so some seconds
        after it has accepted the request, so this waits for it, and then removes what was created.
        """
        if len(request.first_boot.encode()) > USER_DATA_BYTES:
            raise UsageError("the first-boot script is larger than the 64 KB that Azure accepts")
        name = tags.make_server_name(request)
        record = tags.make_record(offer, request, self._owner)
        group = network.find_group(record)
        if machines.find_machine(self._arm, name) is None:
            self._ensure_network(group, gang=bool(request.gang))
            try:
                self._put_parts(name, record, group, request)
            except (BusyError, ThrottledError):
                # The same request goes on, and finds out whether the call had its effect.
                raise
            except LabError as error:
                self._discard(name)
                raise _explain_refusal(error, offer) from error
        try:
            server = machines.find_server(self._arm, name, self._settings.user)
        except LabError as error:
            # The machine exists: no refusal of this call means that it does not.
            raise BusyError(
                f"Azure has not said how {name} is", why=error.what, hint=error.next_step
            ) from error
        if server is None:
            raise BusyError(
                "Azure does not list the new server yet",
                why=name,
                hint="run the same command again in a minute",
            )
        endpoint = msgspec.structs.replace(server.endpoint, identity=request.identity)
        return msgspec.structs.replace(server, endpoint=endpoint)

    def _ensure_network(self, group: NetworkGroup, *, gang: bool) -> None:
        with self._lock:
            if (group, gang) not in self._networks:
                network.ensure_network(self._arm, self._settings, group, self._owner, gang=gang)
                self._networks.add((group, gang))

    def _put_parts(
        self, name: str, record: AzureRecord, group: NetworkGroup, request: CreateServerRequest
    ) -> None:
        arm, region = self._arm, record.offer.region
        labels = tags.make_search_tags(record.lab, record.lab_id, record.owner)
        ip_path = arm.resource_path(machines.ADDRESSES, f"{name}{tags.IP_ENDING}")
        address = bodies.AddressBody(
            location=region, tags=labels, sku=bodies.SkuBody(name="Standard")
        )
        arm.create_or_replace(
            ip_path, network.VERSION, permissions.WRITE_IP, address, network.WAIT_S
        )
        nic_path = arm.resource_path(machines.NICS, f"{name}{tags.NIC_ENDING}")
        nic = self._build_nic(region, labels, group, ip_path)
        arm.create_or_replace(nic_path, network.VERSION, permissions.WRITE_NIC, nic, network.WAIT_S)
        vm = self._build_machine(name, record, request, nic_path)
        vm_path = arm.resource_path(machines.VMS, name)
        begun = arm.begin("PUT", vm_path, machines.VERSION, permissions.WRITE, vm)
        # A machine is complete only once its system runs; until then, it is `starting`.
        arm.wait(begun, permissions.WRITE, machines.OPERATION_S)

    def _discard(self, name: str) -> None:
        """Remove what a refused machine has left: Azure keeps a failed one in its lists."""
        with suppress(LabError):
            machines.delete_machine(self._arm, name)
        for kind, ending in (
            (machines.NICS, tags.NIC_ENDING),
            (machines.ADDRESSES, tags.IP_ENDING),
        ):
            with suppress(LabError):
                delete_part(self._arm, kind, f"{name}{ending}", machines.OPERATION_S)

    def _build_nic(
        self, region: str, labels: dict[str, str], group: NetworkGroup, ip_path: str
    ) -> bodies.NicBody:
        config = bodies.IpConfigBody(
            name="primary",
            properties=bodies.IpConfigProperties(
                subnet=ResourceRef(id=network.get_subnet_path(self._arm, group)),
                public_ip_address=bodies.IpRefBody(id=ip_path),
            ),
        )
        nsg = self._arm.resource_path(network.NSGS, group.nsg)
        return bodies.NicBody(
            location=region,
            tags=labels,
            properties=bodies.NicProperties(
                ip_configurations=(config,), network_security_group=ResourceRef(id=nsg)
            ),
        )

    def _build_machine(
        self, name: str, record: AzureRecord, request: CreateServerRequest, nic_path: str
    ) -> bodies.VmBody:
        """Build the whole request, only from the offer, the request and settings."""
        offer, settings = record.offer, self._settings
        key = bodies.SshKeyBody(
            path=f"/home/{settings.user}/.ssh/authorized_keys", key_data=request.public_key
        )
        ceiling = request.need.max_price_usd_per_hour
        properties = bodies.VmBodyProperties(
            hardware_profile=bodies.HardwareBody(vm_size=offer.type),
            storage_profile=self._build_storage(name, offer),
            os_profile=bodies.OsBody(
                computer_name=name[:LONGEST_HOSTNAME],
                admin_username=settings.user,
                linux_configuration=bodies.LinuxBody(ssh=bodies.SshBody(public_keys=(key,))),
                custom_data=base64.b64encode(request.first_boot.encode()).decode(),
            ),
            network_profile=bodies.VmNetworkBody(
                network_interfaces=(bodies.NicRefBody(id=nic_path),)
            ),
            diagnostics_profile=bodies.DiagnosticsBody(),
            priority="Spot" if offer.spot else "Regular",
            eviction_policy="Delete" if offer.spot else "",
            billing_profile=bodies.BillingBody(max_price=ceiling or -1.0) if offer.spot else None,
        )
        return bodies.VmBody(
            location=offer.region, tags=tags.make_tags(record), properties=properties
        )

    def _build_storage(self, name: str, offer: Offer) -> bodies.StorageBody:
        publisher, image_offer, sku, version = choose_image(self._settings, offer).split(":")
        return bodies.StorageBody(
            image_reference=bodies.ImageBody(
                publisher=publisher, offer=image_offer, sku=sku, version=version
            ),
            os_disk=bodies.OsDiskBody(
                name=f"{name}{tags.DISK_ENDING}",
                disk_size_gb=math.ceil(self._settings.disk_bytes / GIB),
                managed_disk=bodies.ManagedDiskBody(storage_account_type=DISK_TYPE),
            ),
        )


def choose_image(settings: AzureSettings, offer: Offer) -> str:
    return settings.image or (GPU_IMAGE if offer.gpu_count else PLAIN_IMAGE)


def _explain_refusal(error: LabError, offer: Offer) -> LabError:
    """Return the error of a refused machine with its name, and whether another may fit."""
    market = "spot" if offer.spot else "on-demand"
    machine = f"{offer.type} ({market}) in {offer.region}"
    if isinstance(error, CapacityError):
        return CapacityError(f"{machine}: {error.what}", why=error.why, hint=error.next_step)
    if type(error) is ProviderError:
        # A definite refusal: nothing was created, and the same request would be refused again.
        return UsageError(
            f"Azure refused {machine}",
            why=error.why,
            hint="labctl config   # shows the settings of server.azure",
        )
    return error
