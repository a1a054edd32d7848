"""The machine image that a server boots from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labctl.errors import UsageError
from labctl.lazy import lazy_imports
from labctl.model import Offer, Value
from labctl.providers.aws.clients import Clients
from labctl.providers.aws.errors import get_message, is_absent, translate_errors

if TYPE_CHECKING:
    from labctl.providers.aws.settings import AwsSettings

with lazy_imports(__name__):
    from botocore import exceptions as boto_errors

# AWS's Deep Learning Base OSS Nvidia Driver GPU AMI: driver, Docker, the container toolkit.
GPU_PARAMETER = (
    "/aws/service/deeplearning/ami/{arch}/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
)
PLAIN_PARAMETER = (
    "/aws/service/canonical/ubuntu/server/24.04/stable/current/{arch}/hvm/ebs-gp3/ami-id"
)
_CANONICAL_ARCH = {"x86_64": "amd64", "arm64": "arm64"}


class MachineImage(Value, frozen=True):
    """`root` is the root volume's device name, `gib` its minimum size in GiB."""

    id: str
    root: str
    gib: int


def choose_parameter(offer: Offer) -> str:
    if offer.gpu_count:
        return GPU_PARAMETER.format(arch=offer.arch)
    return PLAIN_PARAMETER.format(arch=_CANONICAL_ARCH.get(offer.arch, offer.arch))


def find_image(clients: Clients, settings: AwsSettings, offer: Offer) -> MachineImage:
    """Find the configured image, else the newest that fits the offer. UsageError without one."""
    ami = settings.ami or choose_parameter(offer)
    if ami.startswith("/"):
        ami = _resolve_parameter(clients, ami, offer.region)
    return _describe_image(clients, ami, offer.region)


def _resolve_parameter(clients: Clients, name: str, region: str) -> str:
    with translate_errors():
        try:
            answer = clients.get_ssm(region).get_parameter(Name=name)
        except boto_errors.ClientError as error:
            if not is_absent(error):
                raise
            raise _make_absent_error(name, region, get_message(error)) from error
    return str(answer["Parameter"]["Value"])


def _describe_image(clients: Clients, ami: str, region: str) -> MachineImage:
    with translate_errors():
        try:
            images = clients.get_ec2(region).describe_images(ImageIds=[ami])["Images"]
        except boto_errors.ClientError as error:
            if not is_absent(error):
                raise
            images = []
    if not images:
        why = "it does not exist, or it is not shared with this account"
        raise _make_absent_error(ami, region, why)
    root = images[0].get("RootDeviceName") or "/dev/sda1"
    sizes = [
        mapping["Ebs"].get("VolumeSize", 0)
        for mapping in images[0].get("BlockDeviceMappings", ())
        if mapping.get("DeviceName") == root and "Ebs" in mapping
    ]
    return MachineImage(id=ami, root=root, gib=max(sizes, default=0))


def _make_absent_error(name: str, region: str, why: str) -> UsageError:
    return UsageError(
        f"the image {name} is not in {region}",
        why=why,
        hint="set server.aws.ami to an image of that region, or server.aws.regions to the image's",
    )
