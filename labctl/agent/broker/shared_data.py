"""Where staff puts data sets for every account of a shared server."""

from __future__ import annotations

from pathlib import Path

# Mounted read-only at SHARED_TARGET in every container.
SHARED = Path("/srv/labctl")
SHARED_TARGET = "/lab/shared"
