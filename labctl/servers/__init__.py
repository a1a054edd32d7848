"""Servers: creation, first contact, preparation, guards, removal and cost.

`context.LabContext` is the argument of every flow: a lab's configuration, state, provider and
connections. `attempts` creates servers and `end_server` removes them; `prepare` turns a machine
into a lab server; `guard` and `deadlines` limit what a server can cost; `leftovers` finds
everything that has labctl's tag; `agent` calls the labctl agent on a server.

`power`, `quotas`, `machine_images`, `reclaimer`, `firewall`, `disk_retention` and `kept_disks`
offer what only some providers can do: only this package asks a provider for optional protocols,
with `isinstance`.

May import: providers, transports, state and the layers below.
"""
