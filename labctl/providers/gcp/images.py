"""The machine image that a server boots from."""

from __future__ import annotations

from labctl.errors import LabError, UsageError
from labctl.model import Offer
from labctl.providers.gcp import permissions
from labctl.providers.gcp.clients import GcpClients, is_absent
from labctl.providers.gcp.replies import GceImage
from labctl.providers.gcp.settings import GcpSettings

# Canonical's Ubuntu with NVIDIA's driver, and without: both have cloud-init, as Google's own Debian
# images have not.
GPU_IMAGE = "ubuntu-os-accelerator-images/family/ubuntu-accelerator-2404-amd64-with-nvidia-580"
PLAIN_IMAGE = "ubuntu-os-cloud/family/ubuntu-2404-lts-amd64"
PLAIN_ARM_IMAGE = "ubuntu-os-cloud/family/ubuntu-2404-lts-arm64"


def choose_image(settings: GcpSettings, offer: Offer) -> str:
    if settings.image:
        return settings.image
    if offer.gpu_count:
        return GPU_IMAGE
    return PLAIN_ARM_IMAGE if offer.arch == "arm64" else PLAIN_IMAGE


def find_image(clients: GcpClients, settings: GcpSettings, offer: Offer) -> GceImage:
    """Find the configured image, else the newest that fits the offer. UsageError without one."""
    chosen = choose_image(settings, offer)
    project, *family, name = chosen.split("/")
    try:
        if family:
            return clients.read(
                GceImage,
                "images",
                "get_from_family",
                permissions.READ_IMAGE,
                project=project,
                family=name,
            )
        return clients.read(
            GceImage, "images", "get", permissions.READ_IMAGE, project=project, image=name
        )
    except LabError as error:
        if not is_absent(error):
            raise
        raise UsageError(
            f"Google has no image {chosen}",
            why="it does not exist, or it is not shared with this project",
            hint="set server.gcp.image; the list of images: gcloud compute images list",
        ) from error
