"""The path of this program on the server: an archive or a directory that `python3` runs."""

from __future__ import annotations

from pathlib import Path

PROGRAM = Path(__file__).parents[1]
