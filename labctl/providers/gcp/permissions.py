"""The permissions that labctl needs at Google Cloud: docs/gcp.md has them as a role."""

from __future__ import annotations

PAGE = "labctl docs gcp"
ROLE_HINT = f"have the owner of the project grant you labctl's role\n{PAGE}   # the role"

CREATE, READ, LIST, DELETE = (
    "compute.instances.create",
    "compute.instances.get",
    "compute.instances.list",
    "compute.instances.delete",
)
START, STOP = "compute.instances.start", "compute.instances.stop"
SET_METADATA = "compute.instances.setMetadata"
CONSOLE = "compute.instances.getSerialPortOutput"
ATTACH = "compute.instances.attachDisk"
KEEP = "compute.instances.setDiskAutoDelete"
LIST_DISKS, DELETE_DISK = "compute.disks.list", "compute.disks.delete"
LABEL_DISK = "compute.disks.setLabels"
LIST_FIREWALLS, CREATE_FIREWALL = "compute.firewalls.list", "compute.firewalls.create"
READ_FIREWALL, UPDATE_FIREWALL = "compute.firewalls.get", "compute.firewalls.update"
DELETE_FIREWALL = "compute.firewalls.delete"
LIST_ADDRESSES, DELETE_ADDRESS = "compute.addresses.list", "compute.addresses.delete"
READ_ZONE_OPERATION = "compute.zoneOperations.get"
LIST_ZONE_OPERATIONS = "compute.zoneOperations.list"
READ_OPERATION = "compute.globalOperations.get"
READ_PROJECT, LIST_REGIONS = "compute.projects.get", "compute.regions.list"
READ_IMAGE = "compute.images.getFromFamily"

# Those without which `up` and `down` fail. Public images need no permission.
REQUIRED = (
    CREATE,
    READ,
    LIST,
    DELETE,
    SET_METADATA,
    "compute.instances.setLabels",
    "compute.instances.setTags",
    "compute.disks.create",
    LIST_DISKS,
    DELETE_DISK,
    "compute.networks.updatePolicy",
    "compute.subnetworks.use",
    "compute.subnetworks.useExternalIp",
    LIST_FIREWALLS,
    CREATE_FIREWALL,
    READ_FIREWALL,
    UPDATE_FIREWALL,
    DELETE_FIREWALL,
    LIST_ADDRESSES,
    READ_ZONE_OPERATION,
    READ_OPERATION,
    READ_PROJECT,
    LIST_REGIONS,
)
# Those of one command each: what it does without the permission.
OPTIONAL = {
    START: "labctl stop, and up of a stopped server",
    STOP: "labctl stop",
    CONSOLE: "the boot output of a server that ssh does not reach",
    ATTACH: "results on a kept disk",
    "compute.disks.use": "results on a kept disk",
    KEEP: "keeping the disk of a server with unsaved results",
    LABEL_DISK: "keeping the disk of a server with unsaved results",
    LIST_ZONE_OPERATIONS: "the reason why a server ended",
    "serviceusage.services.use": "signing in with gcloud auth application-default login",
    DELETE_ADDRESS: "removing reserved addresses with labctl's label",
}
