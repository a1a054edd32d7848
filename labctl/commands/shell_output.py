"""Parse what shell commands on a server print. Any other text counts as nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from labctl.model import Gpu


def parse_int_or_zero(text: str) -> int:
    """Parse a number without a sign; 0 for any other text."""
    return int(text) if re.fullmatch(r"[0-9]{1,20}", text) else 0


def parse_gpus(rows: Iterable[str]) -> tuple[Gpu, ...]:
    """Parse nvidia-smi's rows (uuid, MiB, driver, name); any other line is an error message."""
    return tuple(_parse_rows(rows))


def _parse_rows(rows: Iterable[str]) -> Iterator[Gpu]:
    for row in rows:
        fields = [field.strip() for field in row.split(",", 3)]
        if len(fields) == 4 and fields[0].startswith(("GPU-", "MIG-")):
            uuid, mib, driver, name = fields
            size_bytes = parse_int_or_zero(mib) * 1024**2
            yield Gpu(name=name, uuid=uuid, memory_bytes=size_bytes, driver=driver)
