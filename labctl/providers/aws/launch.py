"""Launch a server: one RunInstances with a token, after everything that it needs exists."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, cast

from labctl.errors import BusyError, CapacityError, UsageError
from labctl.lazy import lazy_imports
from labctl.model import GIB, CreateServerRequest, Offer, Server
from labctl.providers.aws import tags
from labctl.providers.aws.clients import Clients
from labctl.providers.aws.errors import get_code, get_message, translate_errors
from labctl.providers.aws.images import MachineImage, find_image
from labctl.providers.aws.keys import ensure_key
from labctl.providers.aws.launch_errors import make_launch_error
from labctl.providers.aws.network import (
    Subnet,
    admit_members,
    admit_networks,
    ensure_group,
    find_subnet,
    list_ssh_networks,
)
from labctl.providers.aws.placement import ensure_placement_group

if TYPE_CHECKING:
    from botocore.exceptions import ClientError
    from mypy_boto3_ec2 import EC2Client
    from mypy_boto3_ec2.literals import InstanceTypeType
    from mypy_boto3_ec2.type_defs import (
        BlockDeviceMappingTypeDef,
        EbsBlockDeviceTypeDef,
        RunInstancesRequestTypeDef,
        TagSpecificationTypeDef,
    )

    from labctl.providers.aws.settings import AwsSettings
    from labctl.providers.aws.tags import OwnedInstance

with lazy_imports(__name__):
    from botocore import exceptions as boto_errors

# AWS's limit, counted before base64.
USER_DATA_BYTES = 16 * 1024
GONE = ("shutting-down", "terminated")
# Just created and not visible everywhere yet, or removed by a `down` of another process.
VANISHED = frozenset(
    {
        "InvalidGroup.NotFound",
        "InvalidGroupId.NotFound",
        "InvalidKeyPair.NotFound",
        "InvalidPlacementGroup.Unknown",
        "InvalidSecurityGroupID.NotFound",
        "InvalidSubnetID.NotFound",
    }
)


class LaunchParts(NamedTuple):
    """What a server is launched with.

    `key` is the name of a key pair, `group` the id of a security group, and `placement` the name
    of a placement group, "" for none.
    """

    image: MachineImage
    key: str
    subnet: Subnet
    group: str
    placement: str


class Launcher:
    """Launches servers. Caches what they need, so that thirty servers query it only once."""

    def __init__(self, clients: Clients, settings: AwsSettings, owner: str) -> None:
        self._clients = clients
        self._settings = settings
        self._owner = owner
        self._locks: dict[tuple[str, str], threading.Lock] = {}
        self._lock = threading.Lock()
        self._images: dict[tuple[str, str, bool], MachineImage] = {}
        self._places: dict[tuple[str, str], Subnet] = {}
        self._groups: dict[tuple[str, str, bool], str] = {}
        self._placements: dict[tuple[str, str], str] = {}
        self._keys: dict[tuple[str, str, str], str] = {}
        self._networks: tuple[str, ...] = settings.ssh_from

    def create(self, offer: Offer, request: CreateServerRequest) -> Server:
        """Launch the server of this attempt; the same offer and request return the same server.

        CapacityError: the token's server has ended, or AWS has no capacity for it.
        """
        if len(request.first_boot.encode()) > USER_DATA_BYTES:
            raise UsageError("the first-boot script is larger than the 16 KB that AWS accepts")
        call = self._build_arguments(offer, request)
        instance = self._run(offer, request, call)
        if instance["State"]["Name"] in GONE:
            raise CapacityError(
                "the server of this attempt has already ended",
                why=f"{instance['InstanceId']} is {instance['State']['Name']}",
            )
        server = tags.parse_server(
            {**instance, "Tags": tags.as_pairs(tags.make_server_tags(offer, request, self._owner))},
            offer.region,
            self._settings.user,
        )
        return tags.with_identity(server, request.identity)

    def _run(
        self, offer: Offer, request: CreateServerRequest, call: RunInstancesRequestTypeDef
    ) -> OwnedInstance:
        ec2 = self._clients.get_ec2(offer.region, once=True)
        with translate_errors():
            try:
                answer = ec2.run_instances(**call)
                return tags.with_owner(answer["Instances"][0], answer)
            except boto_errors.ClientError as error:
                code = get_code(error)
                if code == "IdempotentParameterMismatch":
                    return self._find_by_token(offer.region, request.token, error)
                if code in VANISHED:
                    self._clear_caches()
                    why = f"{get_message(error)} ({code})"
                    raise BusyError("the server's resources do not exist yet", why=why) from error
                raise make_launch_error(error, offer) from error

    def _find_by_token(self, region: str, token: str, error: ClientError) -> OwnedInstance:
        """Find a server by its tag: AWS knows its token with other arguments, as an older image."""
        ec2 = self._clients.get_ec2(region)
        with translate_errors():
            reservations = ec2.describe_instances(
                Filters=tags.make_filters({"Name": f"tag:{tags.TOKEN}", "Values": [token]})
            )["Reservations"]
        if not reservations:
            raise BusyError(
                "AWS has received this request, but does not list its server yet",
                why=get_message(error),
            ) from error
        return tags.with_owner(reservations[0]["Instances"][0], reservations[0])

    def _build_arguments(
        self, offer: Offer, request: CreateServerRequest
    ) -> RunInstancesRequestTypeDef:
        """Build the arguments of RunInstances, only from the offer, the request and settings."""
        lab_tags = tags.make_lab_tags(request.lab, request.lab_id, self._owner)
        parts = self._ensure_parts(offer, request, lab_tags)
        call: RunInstancesRequestTypeDef = {
            "ImageId": parts.image.id,
            "InstanceType": cast("InstanceTypeType", offer.type),
            "InstanceInitiatedShutdownBehavior": "terminate",
            "BlockDeviceMappings": self._build_disks(parts.image),
            "MetadataOptions": {
                "HttpEndpoint": "enabled",
                "HttpTokens": "required",
                "HttpPutResponseHopLimit": 1,
            },
            "MinCount": 1,
            "MaxCount": 1,
            "ClientToken": request.token,
            "KeyName": parts.key,
            "NetworkInterfaces": [
                {
                    "DeviceIndex": 0,
                    "SubnetId": parts.subnet.subnet,
                    "Groups": [parts.group],
                    "AssociatePublicIpAddress": True,
                    "DeleteOnTermination": True,
                }
            ],
            "TagSpecifications": self._build_tags(offer, request, lab_tags),
        }
        if profile := self._settings.instance_profile:
            is_arn = profile.startswith("arn:")
            call["IamInstanceProfile"] = {"Arn": profile} if is_arn else {"Name": profile}
        if offer.spot:
            call["InstanceMarketOptions"] = {
                "MarketType": "spot",
                "SpotOptions": {
                    "SpotInstanceType": "one-time",
                    "InstanceInterruptionBehavior": "terminate",
                },
            }
        if parts.placement:
            call["Placement"] = {"GroupName": parts.placement}
        if _has_efa(offer, request):
            # The interface on network card 0, which also has the addresses. See docs/limits.md
            # about types with several cards.
            call["NetworkInterfaces"][0]["InterfaceType"] = "efa"
        if request.first_boot:
            call["UserData"] = request.first_boot
        return call

    def _ensure_parts(
        self, offer: Offer, request: CreateServerRequest, lab_tags: dict[str, str]
    ) -> LaunchParts:
        """Find image and subnet, and create what is missing of key and security group."""
        shared_tags = lab_tags
        if request.group:
            name = request.group_name or request.group
            shared_tags = tags.make_lab_tags(name, request.group, self._owner)
        ec2 = self._clients.get_ec2(offer.region)
        with ThreadPoolExecutor(3) as threads:
            image = threads.submit(self._find_image, offer)
            networks = threads.submit(self._list_networks)
            subnet = self._find_subnet(ec2, offer)
            # Nothing is created before the image to boot is known to exist.
            image.result(), networks.result()
            key = threads.submit(
                self._ensure_key, ec2, offer.region, request.public_key, shared_tags
            )
            efa = _has_efa(offer, request)
            group = self._ensure_group(
                ec2, subnet.vpc, networks.result(), shared_tags, gang=bool(request.gang), efa=efa
            )
            placement = ""
            if request.gang and offer.cluster_placement:
                placement = self._ensure_placement(ec2, subnet.zone, shared_tags)
            return LaunchParts(image.result(), key.result(), subnet, group, placement)

    def _build_disks(self, machine_image: MachineImage) -> list[BlockDeviceMappingTypeDef]:
        gib = max(math.ceil(self._settings.disk_bytes / GIB), machine_image.gib)
        root: EbsBlockDeviceTypeDef = {
            "VolumeSize": gib,
            "VolumeType": "gp3",
            "Encrypted": True,
            "DeleteOnTermination": True,
        }
        return [{"DeviceName": machine_image.root, "Ebs": root}]

    def _build_tags(
        self, offer: Offer, request: CreateServerRequest, lab_tags: dict[str, str]
    ) -> list[TagSpecificationTypeDef]:
        part_tags = tags.as_pairs({**lab_tags, tags.TOKEN: request.token})
        server_tags = tags.as_pairs(tags.make_server_tags(offer, request, self._owner))
        specifications: list[TagSpecificationTypeDef] = [
            {"ResourceType": "instance", "Tags": server_tags},
            {"ResourceType": "volume", "Tags": part_tags},
            {"ResourceType": "network-interface", "Tags": part_tags},
        ]
        if offer.spot:
            specifications.append({"ResourceType": "spot-instances-request", "Tags": part_tags})
        return specifications

    def _find_image(self, offer: Offer) -> MachineImage:
        key = (offer.region, offer.arch, offer.gpu_count > 0)
        with self._lock:
            if key not in self._images:
                self._images[key] = find_image(self._clients, self._settings, offer)
            return self._images[key]

    def _find_subnet(self, ec2: EC2Client, offer: Offer) -> Subnet:
        key = (offer.region, offer.zone)
        if key not in self._places:
            self._places[key] = find_subnet(ec2, self._settings, offer.zone)
        return self._places[key]

    def _list_networks(self) -> tuple[str, ...]:
        if not self._networks:
            self._networks = list_ssh_networks(self._settings)
        return self._networks

    def _ensure_group(
        self,
        ec2: EC2Client,
        vpc: str,
        networks: tuple[str, ...],
        lab_tags: dict[str, str],
        *,
        gang: bool,
        efa: bool,
    ) -> str:
        key = (vpc, lab_tags[tags.LAB_ID], efa)
        with self._locks.setdefault(key[:2], threading.Lock()):
            if key not in self._groups:
                group = ensure_group(ec2, vpc, lab_tags)
                admit_networks(ec2, group, networks, self._owner)
                if gang:
                    admit_members(ec2, group, efa=efa)
                self._groups[key] = group["GroupId"]
            return self._groups[key]

    def _ensure_placement(self, ec2: EC2Client, zone: str, lab_tags: dict[str, str]) -> str:
        key = (zone, lab_tags[tags.LAB_ID])
        with self._locks.setdefault(key, threading.Lock()):
            if key not in self._placements:
                self._placements[key] = ensure_placement_group(ec2, zone, lab_tags)
            return self._placements[key]

    def _ensure_key(
        self, ec2: EC2Client, region: str, public_key: str, lab_tags: dict[str, str]
    ) -> str:
        key = (region, lab_tags[tags.LAB_ID], public_key)
        with self._lock:
            if key not in self._keys:
                self._keys[key] = ensure_key(ec2, public_key, lab_tags)
            return self._keys[key]

    def _clear_caches(self) -> None:
        self._groups.clear()
        self._placements.clear()
        self._keys.clear()
        self._places.clear()


def _has_efa(offer: Offer, request: CreateServerRequest) -> bool:
    """Whether the server gets an Elastic Fabric Adapter, which only servers of a gang can use."""
    return bool(request.gang) and offer.rdma
