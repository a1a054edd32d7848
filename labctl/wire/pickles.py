"""What a pickle would do when it is loaded, found without loading it.

A pickle is a program: `torch.load` and `joblib.load` run it. What it may name is listed here; one
that names anything else is refused, and so is one that cannot be read to its end. Whoever loads a
stranger's pickle still does so in a container: `weights_only=True` is no sandbox.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Iterator
from typing import BinaryIO

# Of one pickle; PyTorch keeps tensors outside of it.
MAX_BYTES = 64 * 1024 * 1024
MAX_STREAMS = 16
# Things that one pickle keeps for later; each takes memory here for one byte there.
MAX_KEPT = 500_000
FRAME_HEAD_BYTES = 9
UNSEEN = "and cannot be looked into"
NO_STEP = "unknown"
# Where pickletools stops because every unpickler does: there is no such step, or no more bytes.
CUT = ("exhausted", "not enough data", "remain", "no newline found")
# What such a name promises must be read to be believed.
SUFFIXES = frozenset(
    (".pkl", ".pickle", ".pt", ".pth", ".joblib", ".dill", ".sav", ".ckpt", ".pck", ".npy")
)
ALLOWED = frozenset(
    f"{module} {name}"
    for module, names in {
        "builtins": "object set frozenset bytearray complex slice range dict list tuple",
        "__builtin__": "object set frozenset bytearray complex slice xrange range dict list tuple",
        "_codecs": "encode",
        "collections": "OrderedDict defaultdict Counter deque",
        "copyreg": "_reconstructor",
        "copy_reg": "_reconstructor",
        "datetime": "datetime date time timedelta",
        "decimal": "Decimal",
        "numpy": "ndarray dtype",
        "numpy.core.multiarray": "_reconstruct scalar",
        "numpy._core.multiarray": "_reconstruct scalar",
        "numpy.core.numeric": "_frombuffer",
        "numpy._core.numeric": "_frombuffer",
        "torch": (
            "FloatStorage DoubleStorage HalfStorage BFloat16Storage LongStorage IntStorage "
            "ShortStorage CharStorage ByteStorage BoolStorage ComplexFloatStorage "
            "ComplexDoubleStorage Tensor Size device dtype float32 float64 float16 bfloat16 "
            "int64 int32 int16 int8 uint8 bool complex64 complex128 strided"
        ),
        "torch.storage": "UntypedStorage TypedStorage",
        "torch.nn.parameter": "Parameter Buffer",
        "torch._utils": (
            "_rebuild_tensor _rebuild_tensor_v2 _rebuild_parameter "
            "_rebuild_parameter_with_state _rebuild_sparse_tensor _rebuild_qtensor"
        ),
        "torch.serialization": "_get_layout",
    }.items()
    for name in names.split()
)
_TEXT = frozenset(
    ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE", "STRING", "BINSTRING",
     "SHORT_BINSTRING")
)  # fmt: skip
_KEEP = frozenset(("PUT", "BINPUT", "LONG_BINPUT"))
_FETCH = frozenset(("GET", "BINGET", "LONG_BINGET"))
_REGISTRY = frozenset(("EXT1", "EXT2", "EXT4"))


def is_pickle(head: bytes) -> bool:
    """Whether a file with this beginning is a pickle of protocol 2 or newer."""
    return len(head) > 2 and head[0] == 0x80 and 2 <= head[1] <= 5


def find_hazard(file: BinaryIO, size: int, *, promised: bool) -> str:
    """Why the pickle that begins here must not be loaded; "" where it names tensors and data only.

    Reads `file` from where it is. Where nothing but the first bytes `promised` a pickle, one that
    no unpickler would read is none: numbers may begin as it does.
    """
    data = file.read(min(size, MAX_BYTES))
    at = 0
    for number in range(MAX_STREAMS):
        try:
            at += _length(data[at:])
        except _Broken as broken:
            # It ends there for whoever loads it, too. After the first, the bytes of tensors follow.
            if broken.cut and size > len(data):
                return f"its pickle goes beyond {MAX_BYTES // 1024**2} MiB, {UNSEEN}"
            return f"it is no whole pickle, {UNSEEN}" if promised and number == 0 else ""
        except _Hazard as found:
            return str(found)
        if at >= len(data):
            return ""
    return f"it holds more than {MAX_STREAMS} pickles, {UNSEEN}"


class _Hazard(Exception):
    """What it would do."""


class _Broken(Exception):
    """Every unpickler stops here, and what came before was harmless. `cut`: for want of bytes."""

    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.cut = cut


def _length(data: bytes) -> int:
    """How long the harmless pickle is that `data` begins with."""
    file = io.BytesIO(data)
    try:
        for called in _called(file):
            if called is None:
                raise _Hazard("it would call something that its pickle hides")
            if called not in ALLOWED:
                raise _Hazard(f"loading it would run {'.'.join(called.split(' ', 1))!a}")
    except (ValueError, IndexError, OverflowError, MemoryError) as error:
        cut = any(words in str(error) for words in CUT)
        if isinstance(error, UnicodeDecodeError) or not (cut or NO_STEP in str(error)):
            # An unpickler may read here what pickletools does not, and go on.
            raise _Hazard(f"its pickle cannot be read ({error!s:.60}), {UNSEEN}") from None
        raise _Broken(cut) from None
    return file.tell()


def _called(file: BinaryIO) -> Iterator[str | None]:
    """Every `module name` that a pickle asks for; None where nobody can tell before it runs.

    Knows the top of the stack only after what puts a text there: whatever else happens in between
    makes it unknown, so that no order of steps makes one name look like another.
    """
    top: list[str | None] = []
    kept: dict[int, str | None] = {}
    frame_end = 0
    for code, argument, at in pickletools.genops(file):
        name = code.name
        if name == "FRAME":
            frame_end = max(frame_end, (at or 0) + FRAME_HEAD_BYTES + int(argument or 0))
        if name == "STOP" and (at or 0) + 1 < frame_end:
            # Some unpicklers take a frame at once: the next pickle begins behind it for them.
            raise _Hazard(f"its pickle ends before its frame does, {UNSEEN}")
        if len(kept) > MAX_KEPT:
            raise _Hazard(f"its pickle keeps more than {MAX_KEPT} things, {UNSEEN}")
        if name in _TEXT:
            top.append(str(argument))
        elif name == "MEMOIZE":
            kept[len(kept)] = top[-1] if top else None
        elif name in _KEEP:
            kept[int(argument or 0)] = top[-1] if top else None
        elif name in _FETCH:
            top.append(kept.get(int(argument or 0)))
        else:
            if name in ("GLOBAL", "INST"):
                yield str(argument)
            elif name == "STACK_GLOBAL":
                if len(top) < 2:
                    raise ValueError(f"{NO_STEP}: nothing is there to be called")
                module, wanted = top[-2:]
                yield f"{module} {wanted}" if module is not None and wanted is not None else None
            elif name in _REGISTRY and top:
                yield None
            top.append(None)
        del top[:-2]
