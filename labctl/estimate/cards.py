"""Published performance of GPUs, for price per unit of work.

Sources, per GPU and not per board:

- NVIDIA's data sheets of each card (T4, A10G, L4, L40S, V100, A100, H100, H200, B200, Tesla M60,
  Tesla K80). RTX 4090: NVIDIA Ada GPU Architecture, white paper, appendix A.
- MI300X: AMD Instinct MI300X Accelerator, data sheet.
- TPU v5e: Google Cloud, TPU v5e, key chip specifications. It publishes no rate for fp32.
- Trainium: AWS Neuron, Trainium Architecture (the first generation, of Trn1).

What the figures mean:

- `fp32_tflops`: plain single precision.
- `fp16_tflops`: half precision with fp32 sums on tensor cores, without sparsity; for cards without
  tensor cores the value of fp32, since half precision is no faster there.
- `bandwidth_gb_per_s`: of the GPU's memory, in 10^9 bytes.

These are peaks. Real work reaches a part of them, a similar part on cards of the same generation.
"""

from __future__ import annotations

import difflib
import re
from typing import NamedTuple

GIB = 1024**3
# Drivers and clouds report up to this share less memory than the nominal size.
NOMINAL = 0.02
# Words in the names of variants that are slower than the listed card of that name.
SLOWER = {
    "H100": frozenset({"PCIE", "NVL"}),
    "H200": frozenset({"PCIE", "NVL"}),
    "RTX 4090": frozenset({"D", "LAPTOP", "MOBILE"}),
}


class Card(NamedTuple):
    """One GPU model. Its name is the words for it in the names of clouds and of nvidia-smi.

    `fp32_tflops` is 0 if the maker publishes none. `rentable` is whether labctl can get one: its
    images and its agent are for NVIDIA's GPUs.
    """

    name: str
    memory_bytes: int
    fp32_tflops: float
    fp16_tflops: float
    bandwidth_gb_per_s: float
    rentable: bool = True

    @property
    def words(self) -> frozenset[str]:
        return frozenset(self.name.upper().split())


CARDS = (
    Card("K80", 12 * GIB, 4.37, 4.37, 240.0),
    Card("M60", 8 * GIB, 4.8, 4.8, 160.0),
    Card("V100", 16 * GIB, 15.7, 125.0, 900.0),
    Card("V100", 32 * GIB, 15.7, 125.0, 900.0),
    Card("T4", 16 * GIB, 8.1, 65.0, 320.0),
    Card("T4G", 16 * GIB, 8.1, 65.0, 320.0),
    Card("A10G", 24 * GIB, 35.0, 70.0, 600.0),
    Card("L4", 24 * GIB, 30.3, 121.0, 300.0),
    Card("RTX 4090", 24 * GIB, 82.6, 165.2, 1008.0),
    Card("L40S", 48 * GIB, 91.6, 362.0, 864.0),
    Card("A100", 40 * GIB, 19.5, 312.0, 1555.0),
    Card("A100", 80 * GIB, 19.5, 312.0, 2039.0),
    Card("H100", 80 * GIB, 67.0, 989.0, 3350.0),
    Card("H200", 141 * GIB, 67.0, 989.0, 4800.0),
    Card("B200", 180 * GIB, 75.0, 2250.0, 7700.0),
    Card("MI300X", 192 * GIB, 163.4, 1307.4, 5300.0, rentable=False),
    Card("TPU v5e", 16 * GIB, 0.0, 197.0, 819.0, rentable=False),
    Card("Trainium", 32 * GIB, 47.5, 190.0, 820 * GIB / 1e9, rentable=False),
)
RENTABLE = tuple(card for card in CARDS if card.rentable)
# GPUs that exist and are not listed above: such a name is not a misspelled one
_UNLISTED = (
    *("A2", "A10", "A16", "A30", "A40", "A800", "B100", "B300", "GB200", "GB300", "GH200"),
    *("H20", "H800", "K40", "L20", "L40", "M40", "P4", "P40", "P100"),
)


def plain_name(name: str) -> str:
    """Normalize a GPU's name for comparison: `NVIDIA A100-SXM4` and `a100-sxm4` are equal."""
    words = name.upper().replace("NVIDIA", "").replace("TESLA", "")
    return "".join(letter for letter in words if letter.isalnum())


def suggest_model(kind: str) -> str:
    """Return the GPU that a name which labctl does not know is most similar to, or ""."""
    if find_card(kind, 0) or plain_name(kind) in _UNLISTED:
        return ""
    # There are too many models of RTX to say that one of them does not exist.
    names = {plain_name(card.name): card.name for card in RENTABLE if "RTX" not in card.words}
    near = difflib.get_close_matches(plain_name(kind), names, n=1, cutoff=0.75)
    return names[near[0]] if near and plain_name(kind) != near[0] else ""


def find_card(name: str, memory_bytes: int) -> Card | None:
    """Find the card that a cloud or nvidia-smi names, with the nearest memory size; else None.

    nvidia-smi adds board and memory: `NVIDIA H100 80GB HBM3`, `NVIDIA A100-SXM4-40GB`.
    """
    words = set(re.split(r"[\s_-]+", name.upper()))
    matches = [
        listed
        for listed in CARDS
        if listed.words <= words and not words & SLOWER.get(listed.name, frozenset())
    ]
    return min(matches, key=lambda match: abs(match.memory_bytes - memory_bytes), default=None)


def find_peak_speed(name: str, memory_bytes: int, work: str) -> float | None:
    """Return this GPU's peak for "fp32", "fp16" (TFLOPS) or "bandwidth" (GB/s)."""
    gpu = find_card(name, memory_bytes)
    if gpu is None:
        return None
    figures = {
        "fp32": gpu.fp32_tflops,
        "fp16": gpu.fp16_tflops,
        "bandwidth": gpu.bandwidth_gb_per_s,
    }
    return figures.get(work) or None
