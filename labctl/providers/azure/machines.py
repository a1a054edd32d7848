"""Virtual machines: find, list, stop, start, delete, change their tags, read their console."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import msgspec

from labctl.decoding import decode_json
from labctl.errors import BusyError, LabError, NotFoundError
from labctl.http_client import open_session, read_body
from labctl.model import Server
from labctl.providers.azure import permissions, tags
from labctl.providers.azure.arm import RESOURCES, Arm
from labctl.providers.azure.bodies import MergeTagsBody, TagNames
from labctl.providers.azure.errors import is_absent
from labctl.providers.azure.network import VERSION as NETWORK_VERSION
from labctl.providers.azure.replies import AddressReply, ConsoleReply, VmReply

VERSION = "2024-07-01"
VMS = "Microsoft.Compute/virtualMachines"
ADDRESSES = "Microsoft.Network/publicIPAddresses"
NICS = "Microsoft.Network/networkInterfaces"
# learn.microsoft.com/rest/api/resources/tags/update-at-scope
TAGS = "providers/Microsoft.Resources/tags/default"
# seconds to wait for an operation, so that its error reaches the caller
OPERATION_S = 90.0
CONSOLE_S, CONSOLE_BYTES = 20.0, 4 * 1024**2


def find_machine(arm: Arm, server_id: str) -> VmReply | None:
    """Return one of our machines with its state; None if Azure does not show it."""
    if not tags.is_server_id(server_id):
        return None
    path = arm.resource_path(VMS, server_id)
    vm = arm.find(VmReply, path, VERSION, permissions.READ, expand="instanceView")
    return vm if vm is not None and vm.tags.get(tags.OURS) == "1" else None


def require_machine(arm: Arm, server_id: str) -> VmReply:
    vm = find_machine(arm, server_id)
    if vm is None:
        raise NotFoundError(
            f"Azure does not list the server {server_id}",
            why="it may have been deleted",
            hint=lambda subject: subject.refresh,
        )
    return vm


def list_machines(arm: Arm) -> list[VmReply]:
    """List our machines in every region. They do not show their states."""
    listed = arm.list_all(VmReply, arm.resource_path(VMS), VERSION, permissions.READ)
    return [vm for vm in listed if vm.tags.get(tags.OURS) == "1"]


def find_server(arm: Arm, server_id: str, user: str) -> Server | None:
    vm = find_machine(arm, server_id)
    if vm is None:
        return None
    address = arm.find(
        AddressReply,
        arm.resource_path(ADDRESSES, f"{vm.name}{tags.IP_ENDING}"),
        NETWORK_VERSION,
        permissions.READ_IP,
    )
    host = address.properties.ip_address if address else ""
    return tags.parse_server(vm, host, arm.subscription, user)


def list_servers(arm: Arm, user: str) -> list[Server]:
    """List our servers, oldest first. Azure shows the state of one machine at a time."""
    with ThreadPoolExecutor(8) as threads:
        found = threads.map(lambda vm: find_server(arm, vm.name, user), list_machines(arm))
        servers = [server for server in found if server is not None]
    return sorted(servers, key=lambda server: (server.created_at, server.id))


def delete_machine(arm: Arm, server_id: str) -> None:
    """Delete a machine with its disk, interface and address. An absent one counts as success."""
    if not tags.is_server_id(server_id):
        return
    try:
        arm.begin("DELETE", arm.resource_path(VMS, server_id), VERSION, permissions.DELETE)
    except BusyError:
        # Another deletion of this machine may be under way.
        vm = find_machine(arm, server_id)
        if vm is not None and vm.properties.provisioning_state != "Deleting":
            raise
    except LabError as error:
        if not is_absent(error):
            raise


def stop(arm: Arm, server_id: str) -> None:
    """Deallocate a machine: its disk and its address stay and are charged, the rest is not."""
    _post(arm, server_id, "deallocate", permissions.DEALLOCATE, 0.0)


def start(arm: Arm, server_id: str) -> None:
    """Start a machine; BusyError while it is still being deallocated."""
    _post(arm, server_id, "start", permissions.START, OPERATION_S)


def merge_tags(arm: Arm, vm: VmReply, changed: dict[str, str]) -> None:
    """Add or change these tags of a machine; its other tags stay as they are now."""
    path = f"{arm.resource_path(VMS, vm.name)}/{TAGS}"
    body = MergeTagsBody(properties=TagNames(tags=changed))
    arm.begin("PATCH", path, RESOURCES, permissions.WRITE_TAGS, body)


def pin(arm: Arm, server_id: str, host_key: str, next_host_key: str) -> None:
    """Write the host keys into the record, both in one call, so that no reader sees only one."""
    vm = require_machine(arm, server_id)
    record = tags.parse_record(vm.tags)
    if record is None:
        raise NotFoundError(
            f"the record of {server_id} is damaged",
            why=f"its tags {tags.RECORD}1 and so on are missing or were changed",
            hint=lambda subject: subject.down,
        )
    changed = msgspec.structs.replace(record, host_key=host_key, next_host_key=next_host_key)
    merge_tags(arm, vm, tags.make_record_tags(changed, tags.count_record_tags(vm.tags)))


def read_console(arm: Arm, server_id: str) -> str:
    """Return what the machine has printed on its serial port, a minute or so late."""
    path = f"{arm.resource_path(VMS, server_id)}/retrieveBootDiagnosticsData"
    try:
        begun = arm.begin("POST", path, VERSION, permissions.CONSOLE)
    except LabError as error:
        if is_absent(error):
            return ""
        raise
    address = decode_json(begun.content, ConsoleReply).serial_console_log_blob_uri
    try:
        with (
            open_session() as session,
            session.get(address, timeout=CONSOLE_S, stream=True) as response,
        ):
            response.raise_for_status()
            return read_body(response, CONSOLE_BYTES).decode(errors="replace")
    except OSError:
        # Azure writes the log only some time after the start.
        return ""


def _post(arm: Arm, server_id: str, verb: str, action: str, wait_s: float) -> None:
    require_machine(arm, server_id)
    begun = arm.begin("POST", f"{arm.resource_path(VMS, server_id)}/{verb}", VERSION, action)
    if wait_s:
        arm.wait(begun, action, wait_s)
