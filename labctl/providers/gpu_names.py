"""The names that marketplaces give their GPUs."""

from __future__ import annotations

import re

from labctl.estimate.cards import find_card

_SOCKET = re.compile(r"SXM[0-9]?", re.IGNORECASE)


def name_gpu(name: str, memory_bytes: int) -> str:
    """Return a model's name as users write it: `A100 SXM4` is an A100, an H100 PCIe is slower."""
    words = [word for word in name.replace("_", " ").split() if not _SOCKET.fullmatch(word)]
    if find_card(" ".join(words), memory_bytes):
        words = [word for word in words if word.upper() != "PCIE"]
    return " ".join(words)
