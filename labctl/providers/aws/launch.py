"""Making a server: one RunInstances with a token, and what must be there before it."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from labctl.errors import BusyError, CapacityError, LabError, ProviderError, QuotaError, UsageError
from labctl.model import GIB, CreateRequest, Offer, Server
from labctl.providers.aws import tags
from labctl.providers.aws.clients import Clients
from labctl.providers.aws.errors import code_of, message_of, refusal, told
from labctl.providers.aws.images import Image, image
from labctl.providers.aws.keys import ensure_key
from labctl.providers.aws.network import Place, caller_network, ensure_group, open_to, place
from labctl.providers.aws.quotas import quota_for

if TYPE_CHECKING:
    from botocore.exceptions import ClientError

    from labctl.providers.aws.settings import AwsSettings

# AWS's limit, counted before base64.
USER_DATA_BYTES = 16 * 1024
GONE = ("shutting-down", "terminated")
# Just made and not known everywhere yet, or removed by a `down` beside us.
VANISHED = frozenset(
    {
        "InvalidGroup.NotFound",
        "InvalidGroupId.NotFound",
        "InvalidKeyPair.NotFound",
        "InvalidSecurityGroupID.NotFound",
        "InvalidSubnetID.NotFound",
    }
)


class Launcher:
    """Remembers what it has made sure of, so that thirty servers need it asked once."""

    def __init__(self, clients: Clients, settings: AwsSettings, owner: str) -> None:
        self._clients = clients
        self._settings = settings
        self._owner = owner
        self._locks: dict[tuple[str, str], threading.Lock] = {}
        self._lock = threading.Lock()
        self._images: dict[tuple[str, str, bool], Image] = {}
        self._places: dict[tuple[str, str], Place] = {}
        self._groups: dict[tuple[str, str], str] = {}
        self._keys: dict[tuple[str, str, str], str] = {}
        self._networks: tuple[str, ...] = settings.ssh_from

    def create(self, offer: Offer, request: CreateRequest) -> Server:
        """The server of this attempt. The same offer and request lead to the same one.

        CapacityError: this token leads to nothing any more, or never did.
        """
        if len(request.first_boot.encode()) > USER_DATA_BYTES:
            raise UsageError("the first-boot script is larger than the 16 KB that AWS takes")
        call = self._arguments(offer, request)
        instance = self._run(offer, request, call)
        if instance["State"]["Name"] in GONE:
            raise CapacityError(
                "the server of this attempt has ended already",
                why=f"AWS says that {instance['InstanceId']} is {instance['State']['Name']}",
            )
        server = tags.server_of(
            {**instance, "Tags": tags.pairs(tags.of_request(offer, request, self._owner))},
            offer.region,
            self._settings.user,
        )
        return tags.with_identity(server, request.identity)

    def _run(self, offer: Offer, request: CreateRequest, call: dict[str, Any]) -> dict[str, Any]:
        from botocore.exceptions import ClientError

        ec2 = self._clients.client("ec2", offer.region, once=True)
        with told():
            try:
                answer = ec2.run_instances(**call)
                return tags.with_owner(answer["Instances"][0], answer)
            except ClientError as error:
                code = code_of(error)
                if code == "IdempotentParameterMismatch":
                    return self._of_token(offer.region, request.token, error)
                if code in VANISHED:
                    self._forget()
                    why = f"{message_of(error)} ({code})"
                    raise BusyError("what the server needs is not there yet", why=why) from error
                raise launch_refusal(error, offer) from error

    def _of_token(self, region: str, token: str, error: ClientError) -> dict[str, Any]:
        """AWS knows the token with other arguments, such as an older image: by its tag, then."""
        ec2 = self._clients.ec2(region)
        with told():
            found = ec2.describe_instances(
                Filters=tags.ours({"Name": f"tag:{tags.TOKEN}", "Values": [token]})
            )["Reservations"]
        if not found:
            raise BusyError(
                "AWS knows this attempt, and does not show its server yet", why=message_of(error)
            ) from error
        return tags.with_owner(found[0]["Instances"][0], found[0])

    def _arguments(self, offer: Offer, request: CreateRequest) -> dict[str, Any]:
        """RunInstances as it is sent: everything in it comes from the offer and the request."""
        own = tags.of_lab(request.lab, request.lab_id, self._owner)
        bears = own
        if request.group:
            bears = tags.of_lab(request.group, request.group, self._owner)
        ec2 = self._clients.ec2(offer.region)
        with ThreadPoolExecutor(3) as threads:
            boots = threads.submit(self._image, offer)
            networks = threads.submit(self._allowed)
            stands = self._place(ec2, offer)
            # Nothing is made before it is known that there is an image to boot.
            boots.result(), networks.result()
            key = threads.submit(self._key, ec2, offer.region, request.public_key, bears)
            group = self._group(ec2, stands.vpc, networks.result(), bears)
            return {
                **self._machine(offer, boots.result()),
                **self._spot(offer),
                "MinCount": 1,
                "MaxCount": 1,
                "ClientToken": request.token,
                "KeyName": key.result(),
                **({"UserData": request.first_boot} if request.first_boot else {}),
                "NetworkInterfaces": [
                    {
                        "DeviceIndex": 0,
                        "SubnetId": stands.subnet,
                        "Groups": [group],
                        "AssociatePublicIpAddress": True,
                        "DeleteOnTermination": True,
                    }
                ],
                "TagSpecifications": self._tags(offer, request, own),
            }

    def _machine(self, offer: Offer, boots: Image) -> dict[str, Any]:
        gib = max(math.ceil(self._settings.disk_bytes / GIB), boots.gib)
        root = {
            "VolumeSize": gib,
            "VolumeType": "gp3",
            "Encrypted": True,
            "DeleteOnTermination": True,
        }
        machine: dict[str, Any] = {
            "ImageId": boots.id,
            "InstanceType": offer.type,
            "InstanceInitiatedShutdownBehavior": "terminate",
            "BlockDeviceMappings": [{"DeviceName": boots.root, "Ebs": root}],
            "MetadataOptions": {
                "HttpEndpoint": "enabled",
                "HttpTokens": "required",
                "HttpPutResponseHopLimit": 1,
            },
        }
        profile = self._settings.instance_profile
        if profile:
            kind = "Arn" if profile.startswith("arn:") else "Name"
            machine["IamInstanceProfile"] = {kind: profile}
        return machine

    def _spot(self, offer: Offer) -> dict[str, Any]:
        if not offer.spot:
            return {}
        options = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
        return {"InstanceMarketOptions": {"MarketType": "spot", "SpotOptions": options}}

    def _tags(
        self, offer: Offer, request: CreateRequest, bears: dict[str, str]
    ) -> list[dict[str, Any]]:
        lesser = tags.pairs({**bears, tags.TOKEN: request.token})
        kinds = ["volume", "network-interface", *(["spot-instances-request"] if offer.spot else [])]
        return [
            {
                "ResourceType": "instance",
                "Tags": tags.pairs(tags.of_request(offer, request, self._owner)),
            },
            *({"ResourceType": kind, "Tags": lesser} for kind in kinds),
        ]

    def _image(self, offer: Offer) -> Image:
        key = (offer.region, offer.arch, offer.gpu_count > 0)
        with self._lock:
            if key not in self._images:
                self._images[key] = image(self._clients, self._settings, offer)
            return self._images[key]

    def _place(self, ec2: Any, offer: Offer) -> Place:
        key = (offer.region, offer.zone)
        if key not in self._places:
            self._places[key] = place(ec2, self._settings, offer.zone)
        return self._places[key]

    def _allowed(self) -> tuple[str, ...]:
        if not self._networks:
            self._networks = (caller_network(self._settings),)
        return self._networks

    def _group(self, ec2: Any, vpc: str, networks: tuple[str, ...], bears: dict[str, str]) -> str:
        key = (vpc, bears[tags.LAB_ID])
        with self._locks.setdefault(key, threading.Lock()):
            if key not in self._groups:
                group = ensure_group(ec2, vpc, bears)
                open_to(ec2, group, networks, self._owner)
                self._groups[key] = group["GroupId"]
            return self._groups[key]

    def _key(self, ec2: Any, region: str, public_key: str, bears: dict[str, str]) -> str:
        key = (region, bears[tags.LAB_ID], public_key)
        with self._lock:
            if key not in self._keys:
                self._keys[key] = ensure_key(ec2, public_key, bears)
            return self._keys[key]

    def _forget(self) -> None:
        self._groups.clear()
        self._keys.clear()
        self._places.clear()


def launch_refusal(error: ClientError, offer: Offer) -> LabError:
    """Our error for a RunInstances that AWS refused."""
    known = refusal(error)
    if isinstance(known, QuotaError):
        quota = quota_for(offer.type, offer.spot)
        return QuotaError(
            f"the quota {quota.name!r} does not allow {offer.type} in {offer.region}",
            why=f"it needs {offer.cpus} vCPUs; {known.why}",
            hint=f"ask for more at {quota.link(offer.region)}"
            + ("   # or: labctl up --spot never" if offer.spot else ""),
        )
    if isinstance(known, CapacityError):
        market = "spot" if offer.spot else "on-demand"
        return CapacityError(
            f"no {offer.type} ({market}) in {offer.zone} now", why=known.why, hint=known.hint
        )
    if type(known) is ProviderError:
        # A plain no: nothing was made, and the same again would be refused again.
        return UsageError(
            f"AWS refused to make {offer.type} in {offer.zone}",
            why=known.why,
            hint="labctl config   # what server.aws says",
        )
    return known
