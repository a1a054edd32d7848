"""Instances: find, list, stop, start, delete, and change their record."""

from __future__ import annotations

from typing import Any

import msgspec

from labctl.errors import BusyError, LabError, NotFoundError
from labctl.model import Server
from labctl.providers.gcp import labels, permissions
from labctl.providers.gcp.clients import GcpClients, is_absent
from labctl.providers.gcp.errors import make_operation_error
from labctl.providers.gcp.replies import GceInstance, GceOperation, decode_reply

# seconds to wait for an operation, so that its error reaches the caller
OPERATION_S = 90.0
# An instance that Google took back; its operation has no user.
PREEMPTED = "compute.instances.preempted"
# How often a record is changed again after somebody else changed the metadata.
ATTEMPTS = 3


def find_instance(clients: GcpClients, server_id: str) -> GceInstance | None:
    """Return one of our instances as Google describes it; None if it is not shown."""
    parts = labels.split_id(server_id)
    if parts is None:
        return None
    name, zone = parts
    try:
        instance = clients.read(
            GceInstance, "instances", "get", permissions.READ, zone=zone, instance=name
        )
    except LabError as error:
        if is_absent(error):
            return None
        raise
    return instance if instance.labels.get(labels.OURS) == "1" else None


def require_instance(clients: GcpClients, server_id: str) -> GceInstance:
    instance = find_instance(clients, server_id)
    if instance is None:
        raise NotFoundError(
            f"Google does not list the server {server_id}",
            why="it may have been deleted",
            hint=lambda subject: subject.refresh,
        )
    return instance


def list_instances(clients: GcpClients) -> list[GceInstance]:
    """List our instances of the project, in every zone."""
    return clients.list_everywhere(
        GceInstance, "instances", "instances", permissions.LIST, filter=labels.FILTER
    )


def list_servers(clients: GcpClients, user: str) -> list[Server]:
    """List our servers, oldest first."""
    project = clients.project
    servers = [labels.parse_server(one, project, user) for one in list_instances(clients)]
    return sorted(servers, key=lambda server: (server.created_at, server.id))


def delete_instance(clients: GcpClients, server_id: str) -> None:
    """Delete an instance and the disks that go with it. An absent one counts as success."""
    parts = labels.split_id(server_id)
    if parts is None:
        return
    name, zone = parts
    try:
        clients.call("instances", "delete_unary", permissions.DELETE, zone=zone, instance=name)
    except BusyError:
        # Another delete of this instance may be under way.
        if find_instance(clients, server_id) is not None:
            raise
    except LabError as error:
        if not is_absent(error):
            raise


def stop(clients: GcpClients, server_id: str) -> None:
    """Stop an instance: its disk stays and is charged, the rest is not."""
    _change(clients, server_id, "stop_unary", permissions.STOP)


def start(clients: GcpClients, server_id: str) -> None:
    """Start a stopped instance; BusyError while it is still stopping, CapacityError without room.

    Its longest run time counts from now.
    """
    message = _change(clients, server_id, "start_unary", permissions.START)
    wait_for_zone(clients, message, server_id.rpartition(".")[2], server_id, permissions.START)


def wait_for_zone(clients: GcpClients, message: Any, zone: str, what: str, call: str) -> None:
    """Wait for an operation of a zone, at most OPERATION_S; raise the error that it ended with."""
    done = finish_operation(clients, decode_reply(message, GceOperation), zone)
    if error := make_operation_error(done, what, call):
        raise error


def finish_operation(clients: GcpClients, begun: GceOperation, zone: str) -> GceOperation:
    """Wait for an operation of a zone, at most OPERATION_S; return it as it is then."""

    def read() -> GceOperation:
        return clients.read(
            GceOperation,
            "zone_operations",
            "get",
            permissions.READ_ZONE_OPERATION,
            zone=zone,
            operation=begun.name,
        )

    return clients.wait_for(read, begun, OPERATION_S)


def read_console(clients: GcpClients, server_id: str) -> str:
    """Return what the machine has printed on its first serial port."""
    name, zone = labels.split_id(server_id) or ("", "")
    if not name:
        return ""
    try:
        output = clients.call(
            "instances", "get_serial_port_output", permissions.CONSOLE, zone=zone, instance=name
        )
    except LabError as error:
        if is_absent(error):
            return ""
        raise
    return str(output.contents)


def pin(clients: GcpClients, server_id: str, host_key: str, next_host_key: str) -> None:
    """Write the host keys into the record, both in one call, so that no reader sees only one."""
    for attempt in range(ATTEMPTS):
        instance = require_instance(clients, server_id)
        try:
            _write_keys(clients, instance, server_id, host_key, next_host_key)
            return
        except BusyError:
            # Somebody else has changed the metadata meanwhile.
            if attempt == ATTEMPTS - 1:
                raise


def _write_keys(
    clients: GcpClients, instance: GceInstance, server_id: str, host_key: str, next_host_key: str
) -> None:
    record = labels.parse_record(instance)
    if record is None:
        raise NotFoundError(
            f"the record of {server_id} is damaged",
            why=f"the key {labels.RECORD} of its metadata is missing or was changed",
            hint=lambda subject: subject.down,
        )
    changed = msgspec.structs.replace(record, host_key=host_key, next_host_key=next_host_key)
    types, name, zone = clients.types, instance.name, server_id.rpartition(".")[2]
    items = [
        types.Items(key=item.key, value=item.value)
        for item in instance.metadata.items
        if item.key != labels.RECORD
    ]
    items.append(types.Items(key=labels.RECORD, value=labels.encode_record(changed)))
    message = clients.call(
        "instances",
        "set_metadata_unary",
        permissions.SET_METADATA,
        zone=zone,
        instance=name,
        metadata_resource=types.Metadata(fingerprint=instance.metadata.fingerprint, items=items),
    )
    wait_for_zone(clients, message, zone, "a new host key", permissions.SET_METADATA)


def explain_end(clients: GcpClients, server_id: str) -> str:
    """Return why a server has ended, "" if Google does not say."""
    name, zone = labels.split_id(server_id) or ("", "")
    if not name:
        return ""
    operations = clients.list_all(
        GceOperation,
        "zone_operations",
        "list",
        permissions.LIST_ZONE_OPERATIONS,
        zone=zone,
        filter=f'operationType="{PREEMPTED}"',
    )
    target = f"/zones/{zone}/instances/{name}"
    if any(operation.target_link.endswith(target) for operation in operations):
        return "Google reclaimed the spot machine (compute.instances.preempted)"
    return ""


def _change(clients: GcpClients, server_id: str, method: str, permission: str) -> Any:
    instance = require_instance(clients, server_id)
    zone = server_id.rpartition(".")[2]
    return clients.call("instances", method, permission, zone=zone, instance=instance.name)
