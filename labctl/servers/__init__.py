"""Servers: creation, first contact, preparation, guards, their end, and their cost.

`context.Ground` is what every flow gets: a lab's configuration, state, provider and connections.
`attempts` creates servers and `end_server` removes them; `prepare` turns a machine into a lab
server; `guard` and `deadlines` limit what a server can cost; `leftovers` finds whatever bears
labctl's tag; `agent` calls labctl's program on a server.

May import: providers, transports, state and the layers below. Only this room asks a provider for
its optional protocols.
"""
