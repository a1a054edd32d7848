"""What a step's memory holds, by category, and what that says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec

from labctl.insight.explain.evidence import Evidence, Finding
from labctl.insight.explain.fragmentation import is_fragmented, make_finding
from labctl.insight.explain.sources import OPTIMIZER_STATE, RECOMPUTATION
from labctl.insight.explain.wording import percent
from labctl.model import Value
from labctl.text import bytes_text

# More than any machine has; a file from a server may say anything.
Size = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
MOST_POINTS = 1000
MUCH_ACTIVATIONS = 0.5
SOURCE = "profile.json"


class MemorySizes(Value, frozen=True):
    """Bytes by category, in the order in which they are drawn."""

    parameters: Size = 0
    gradients: Size = 0
    optimizer: Size = 0
    activations: Size = 0
    other: Size = 0

    @property
    def total_bytes(self) -> int:
        return sum(getattr(self, name) for name in self.__struct_fields__)


class AllocatorState(Value, frozen=True):
    """PyTorch's allocator on the GPU. `segments` are [bytes, allocated bytes], the emptiest first.

    `split_bytes` are free pieces of blocks that are partly in use, `retries` how often it gave back
    what it had reserved because memory had run out.
    """

    allocated_peak_bytes: Size
    reserved_bytes: Size
    reserved_peak_bytes: Size
    split_bytes: Size = 0
    retries: Size = 0
    total_bytes: Size = 0
    segments: Annotated[tuple[tuple[Size, Size], ...], msgspec.Meta(max_length=MOST_POINTS)] = ()
    segment_count: Size = 0


class MemoryProfile(Value, frozen=True):
    """The memory of one step, from profiler/memory.py.

    `peak` is at the moment with the most of all, `most` each category at its own. `timeline` is for
    the page: [microseconds, then the bytes of each category]. `process_bytes` is the most main
    memory of the process. `allocator` is None without a GPU.
    """

    device: str
    peak: MemorySizes
    most: MemorySizes
    timeline: Annotated[tuple[tuple[float, ...], ...], msgspec.Meta(max_length=MOST_POINTS)] = ()
    optimizer: str = ""
    process_bytes: Size = 0
    allocator: AllocatorState | None = None


def advise_on_memory(memory: MemoryProfile) -> Iterator[Finding]:
    """Name fragmentation, and what takes most of the memory."""
    state = memory.allocator
    if state and is_fragmented(state.reserved_peak_bytes, state.allocated_peak_bytes):
        text = f"reserved {bytes_text(state.reserved_peak_bytes)}, allocated at most "
        text += (
            f"{bytes_text(state.allocated_peak_bytes)}; {bytes_text(state.split_bytes)} in pieces "
        )
        text += f"of {state.segment_count} segments"
        evidence = Evidence(text=text, source=SOURCE)
        yield make_finding(state.reserved_peak_bytes, state.allocated_peak_bytes, evidence)
    total = memory.peak.total_bytes
    share = memory.peak.activations / total if total else 0.0
    if share >= MUCH_ACTIVATIONS:
        yield Finding(
            rule="memory-is-activations",
            level="advice",
            what=f"{percent(share)} of the memory at the peak holds activations",
            why="they grow with the batch, and everything else does not",
            evidence=(
                Evidence(
                    text=f"{bytes_text(memory.peak.activations)} of {bytes_text(total)}",
                    source=SOURCE,
                ),
            ),
            next="if memory is short: a smaller batch with accumulated gradients, activation "
            "checkpointing, or bf16",
            source=RECOMPUTATION,
        )
    elif memory.peak.optimizer > max(memory.peak.parameters, memory.peak.activations):
        yield Finding(
            rule="memory-is-optimizer",
            level="advice",
            what=f"the optimizer's state is the largest part: {bytes_text(memory.peak.optimizer)}",
            why="it depends on the trained parameters; a smaller batch changes nothing",
            evidence=(Evidence(text=f"optimizer: {memory.optimizer}", source=SOURCE),),
            next="if memory is short: an 8-bit optimizer, fewer trained parameters (LoRA), or ZeRO "
            "on several GPUs",
            source=OPTIMIZER_STATE,
        )
