"""How the ids of auxiliary runs begin: labctl measures something with such a run."""

from __future__ import annotations

PROFILE_PREFIX, PROBE_PREFIX, BANDWIDTH_PREFIX = "profile-", "probe-", "bandwidth-"
AUXILIARY_PREFIXES = (PROFILE_PREFIX, PROBE_PREFIX, BANDWIDTH_PREFIX)
