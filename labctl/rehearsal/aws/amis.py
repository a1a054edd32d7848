"""Machine images, and the public SSM parameters that name the newest ones."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

from moto.ec2.models.amis import Ami, AmiBackend
from moto.ssm.models import Parameter

from labctl.rehearsal.aws.backend import Backend

if TYPE_CHECKING:
    from mypy_boto3_ec2.type_defs import TagSpecificationTypeDef

AMAZON = "898082745236"
CANONICAL = "099720109477"
DLAMI = "/aws/service/deeplearning/ami/{arch}/base-oss-nvidia-driver-gpu-ubuntu-{os}/latest/ami-id"
UBUNTU = "/aws/service/canonical/ubuntu/server/{os}/stable/current/{arch}/hvm/ebs-{disk}/ami-id"
ROOT_DEVICE = "/dev/sda1"
DLAMI_GIB = 75
UBUNTU_GIB = 8


OSES = ("22.04", "24.04")


class SizedImage(Ami):
    """An image whose root volume has its own size; all of moto's have 15 GiB."""

    def __init__(self, gib: int, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.gib = gib

    @property
    def block_device_mappings(self) -> list[dict[str, Any]]:
        disk = {
            "SnapshotId": self.ebs_snapshot.id,
            "VolumeSize": self.gib,
            "DeleteOnTermination": True,
            "VolumeType": "gp3",
            "Encrypted": False,
        }
        return [{"DeviceName": self.root_device_name, "Ebs": disk}]


def add_images(backend: Backend, further: tuple[str, ...]) -> None:
    """Add the images that a lab may request to every region; `further` are x86_64."""
    names = [
        *((DLAMI.format(arch=arch, os=os), arch) for arch in ("x86_64", "arm64") for os in OSES),
        *(
            (UBUNTU.format(arch=arch_name, os=os, disk=disk), arch)
            for arch_name, arch in (("amd64", "x86_64"), ("arm64", "arm64"))
            for os in OSES
            for disk in ("gp2", "gp3")
        ),
        *((name, "x86_64") for name in further),
    ]
    for region in backend.regions:
        with backend.lock():
            for name, arch in names:
                _add(backend, region, name, arch)


def _add(backend: Backend, region: str, name: str, arch: str) -> None:
    ec2 = backend.ec2(region)
    ami_id = f"ami-{hashlib.sha256(f'{region}{name}'.encode()).hexdigest()[:17]}"
    is_deep_learning = "deeplearning" in name
    ec2.amis[ami_id] = SizedImage(
        DLAMI_GIB if is_deep_learning else UBUNTU_GIB,
        ec2,
        ami_id,
        name=_image_title(name, arch),
        description=f"Of a rehearsal, for {name}",
        owner_id=AMAZON if is_deep_learning else CANONICAL,
        owner_alias="amazon",
        public=True,
        virtualization_type="hvm",
        architecture=arch,
        root_device_type="ebs",
        root_device_name=ROOT_DEVICE,
        hypervisor="xen",
        region_name=f"{region}a",
    )
    parameter_class: Any = Parameter
    backend.get_moto_backend("ssm", region)._parameters[name].append(
        parameter_class(
            account_id=backend.account,
            name=name,
            value=ami_id,
            parameter_type="String",
            description=None,
            allowed_pattern=None,
            keyid=None,
            last_modified_date=datetime.now(UTC),
            version=1,
            data_type="aws:ec2:image",
        )
    )


def _image_title(name: str, arch: str) -> str:
    if "deeplearning" in name:
        return f"Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu) {arch} rehearsal"
    return f"ubuntu/images/hvm-ssd-gp3/ubuntu-{arch}-server-rehearsal {name[-60:]}"


_moto_create_image: Any = AmiBackend.create_image


def _create_image(
    self: Any,
    instance_id: str,
    name: str,
    description: str,
    tag_specifications: list[TagSpecificationTypeDef],
) -> Any:
    """Create an image as moto does, which fails if a call has tags for the snapshot."""
    image_tags = [tags for tags in tag_specifications if tags["ResourceType"] != "snapshot"]
    image = _moto_create_image(self, instance_id, name, description, image_tags)
    for tags in tag_specifications:
        for tag in tags["Tags"] if tags["ResourceType"] == "snapshot" else ():
            image.ebs_snapshot.add_tag(tag["Key"], tag["Value"])
    return image


cast(Any, AmiBackend).create_image = _create_image
