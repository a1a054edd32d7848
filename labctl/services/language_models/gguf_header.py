"""The shape of a language model from the header of a GGUF file, which a stranger may have written.

Format: docs/gguf.md of the project ggml. The key-value pairs are read, and where the tensors are;
no tensor is.
"""

from __future__ import annotations

import math
import os
import struct
from typing import BinaryIO

from labctl.estimate.language_model import ModelShape

MAGIC = b"GGUF"
MOST_PAIRS = 10_000
MOST_ITEMS = 10_000_000
# A longer list of numbers is about the tokens.
MOST_LAYERS = 1024
LONGEST_KEY = 65_535
# a chat template has tens of kilobytes
LONGEST_TEXT = 16 * 1024**2
MOST_DIMENSIONS = 4
ALIGNMENT = 32
_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q"}
_NUMBERS |= {11: "<q", 12: "<d"}
_TEXT, _LIST = 8, 9
_LARGEST = 100_000_000
# Of each type of a tensor: the values in a block, and its bytes (ggml.c of the project ggml).
BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),
    9: (32, 40), 10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210),
    15: (256, 292), 16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18),
    21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8),
    28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66), 39: (32, 17), 40: (64, 36),
    41: (128, 18),
}  # fmt: skip


class TruncatedError(ValueError):
    """The file ends before it should, as after a download that was interrupted."""


class _Reader:
    """Reads values in the order of the file; ValueError at its end and beyond a limit."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file

    def number(self, form: str) -> float:
        size = struct.calcsize(form)
        content = self.file.read(size)
        if len(content) < size:
            raise TruncatedError("the file ends within its header")
        value: float = struct.unpack(form, content)[0]
        return value

    def count(self, most: int) -> int:
        value = int(self.number("<Q"))
        if value > most:
            raise ValueError(
                f"its header has {value:,} entries or bytes where {most:,} are allowed"
            )
        return value

    def text(self, most: int) -> str:
        size = self.count(most)
        content = self.file.read(size)
        if len(content) < size:
            raise TruncatedError("the file ends within its header")
        return content.decode(errors="replace")

    def value(self, kind: int) -> float | str | int:
        """Return a number or a text; of a list, what `_read_list` returns."""
        if kind == _TEXT:
            return self.text(LONGEST_TEXT)
        if kind == _LIST:
            return self._read_list()
        if kind not in _NUMBERS:
            raise ValueError(f"its header has a value of the unknown type {kind}")
        return self.number(_NUMBERS[kind])

    def _read_list(self) -> float:
        """Return the largest of one number for each layer, which leads to no too small estimate.

        Of another list, its number of items.
        """
        kind, items = int(self.number("<I")), self.count(MOST_ITEMS)
        if kind in _NUMBERS and 0 < items <= MOST_LAYERS:
            return max(self.number(_NUMBERS[kind]) for _ in range(items))
        if kind in _NUMBERS:
            self.file.seek(items * struct.calcsize(_NUMBERS[kind]), 1)
        elif kind == _TEXT:
            for _ in range(items):
                self.text(LONGEST_TEXT)
        else:
            raise ValueError("its header has a list of lists")
        return items


def read_shape(file: BinaryIO) -> ModelShape:
    """Read the model's shape; ValueError, with the reason, if the file is not such a model.

    TruncatedError if the file is shorter than its header says.
    """
    reader = _Reader(file)
    if file.read(len(MAGIC)) != MAGIC:
        raise ValueError("it does not begin with GGUF")
    version = int(reader.number("<I"))
    if version not in (2, 3):
        raise ValueError(f"it has version {version} of the format; 2 and 3 are known")
    tensors = int(reader.number("<Q"))
    pairs: dict[str, float | str | int] = {}
    for _ in range(reader.count(MOST_PAIRS)):
        key = reader.text(LONGEST_KEY)
        pairs[key] = reader.value(int(reader.number("<I")))
    shape = _build_shape(pairs)
    alignment = pairs.get("general.alignment")
    _require_tensors(reader, tensors, alignment if isinstance(alignment, int) else ALIGNMENT)
    return shape


def _require_tensors(reader: _Reader, tensors: int, alignment: int) -> None:
    """ValueError without tensors; TruncatedError if the file ends before the last one."""
    if not tensors:
        raise ValueError("it has no weights")
    end = 0
    for _ in range(tensors):
        reader.text(LONGEST_KEY)
        dimensions = int(reader.number("<I"))
        if dimensions > MOST_DIMENSIONS:
            raise ValueError(f"it has a tensor of {dimensions} dimensions")
        values = math.prod(int(reader.number("<Q")) for _ in range(dimensions))
        per_block, block_bytes = BLOCKS.get(int(reader.number("<I")), (1, 0))
        offset = int(reader.number("<Q"))
        end = max(end, offset + -(-values // per_block) * block_bytes)
    header_bytes = reader.file.tell()
    needed = -(-header_bytes // max(1, alignment)) * max(1, alignment) + end
    size = reader.file.seek(0, os.SEEK_END)
    if size < needed:
        raise TruncatedError(f"the file has {size:,} bytes, and its header says {needed:,}")


def _build_shape(pairs: dict[str, float | str | int]) -> ModelShape:
    parts = pairs.get("split.count", 0)
    if not isinstance(parts, str) and parts > 1:
        raise ValueError(f"it is one of {parts} parts; llama-gguf-split --merge joins them")
    kind = str(pairs.get("general.architecture", ""))
    tokens = pairs.get("tokenizer.ggml.tokens")

    def find(name: str, default: int = 0) -> int:
        value = pairs.get(f"{kind}.{name}", default)
        if isinstance(value, str) or not 0 <= value <= _LARGEST:
            raise ValueError(f"its header has the {name} {value!r}")
        if not value and not default and name in _REQUIRED:
            raise ValueError(f"its header has no {name}, so it is not a language model")
        return int(value)

    hidden, heads = find("embedding_length"), find("attention.head_count")
    layers = find("block_count")
    experts = find("expert_count")
    window = find("attention.sliding_window")
    return ModelShape(
        kind=kind,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=find("attention.head_count_kv", heads),
        head_dim=find("attention.key_length", max(1, hidden // heads)),
        width=find("feed_forward_length", 1),
        vocabulary=find("vocab_size") or (tokens if isinstance(tokens, int) else 0),
        longest_context=find("context_length"),
        window=window,
        # llama.cpp decides which layers use it; without that, all are taken to be full.
        windowed_layers=0,
        experts=experts if experts > 1 else 0,
        active_experts=find("expert_used_count") if experts > 1 else 0,
        quantized="gguf",
    )


_REQUIRED = ("embedding_length", "attention.head_count", "block_count", "context_length")
