"""The way to a machine of a cluster, which only its login node reaches."""

from typing import NamedTuple


class NodeAccess(NamedTuple):
    """The way to the machine of a job: a command on the login node that speaks SSH there.

    `host_key` is the public key of that SSH server. `run` is the run whose job it is.
    """

    command: str
    host_key: str
    run: str
