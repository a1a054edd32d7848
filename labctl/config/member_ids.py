"""The lab ids of the servers of a lab that has several."""

from __future__ import annotations

from labctl.config.scalars import MOST_SERVERS as MOST_SERVERS
from labctl.lazy import lazy_imports

with lazy_imports(__name__):
    import hashlib  # most labs have one server


def make_member_id(lab_id: str, rank: int) -> str:
    """Return the lab id of a server: that of the lab for rank 0, otherwise 12 hex digits."""
    if rank == 0:
        return lab_id
    return hashlib.sha256(f"{lab_id}:{rank}".encode()).hexdigest()[:12]


def list_lab_ids(lab_id: str) -> list[str]:
    """List the lab ids that the servers of a lab may have, however many it has."""
    return [make_member_id(lab_id, rank) for rank in range(MOST_SERVERS)]
