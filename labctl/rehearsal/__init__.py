"""Simulated clouds on this machine: `labctl rehearse CLOUD`, and the test bed of the providers.

`core` has what every simulated cloud needs: timer, machines as containers, and for clouds with an
HTTP API of their own the application, faults, fleet and scenario. Each other package is a cloud;
see docs/rehearsal.md. Modules that need the extra `labctl[rehearse]` are imported only when a
rehearsal is created.

May import: courses and the layers below.
"""
