"""Find what a pickle would do when it is loaded, without loading it.

A pickle is a program: `torch.load` and `joblib.load` run it. The names that it may use are listed
here. One that uses any other name is refused, and so is one that cannot be read to its end. Load a
stranger's pickle only in a container all the same: `weights_only=True` is no sandbox.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Iterator
from typing import BinaryIO

# bytes of one pickle; PyTorch stores tensors outside of it
MAX_BYTES = 64 * 1024 * 1024
MAX_STREAMS = 16
# entries in a pickle's memo; a single byte of the pickle can take much memory here
MAX_KEPT = 500_000
FRAME_HEAD_BYTES = 9
UNSEEN = "and cannot be inspected"
NO_STEP = "unknown"
# Parts of pickletools' errors where every unpickler stops: an unknown step, or no more bytes. They
# are all ValueErrors.
CUT = ("exhausted", "not enough data", "remain", "no newline found")
# A file with such a name is inspected as a pickle.
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
    """Return whether a file that begins with these bytes is a pickle of protocol 2 or newer."""
    return len(head) > 2 and head[0] == 0x80 and 2 <= head[1] <= 5


def find_hazard(file: BinaryIO, size: int, *, promised: bool) -> str:
    """Return why the pickle that begins here must not be loaded; "" if it uses only allowed names.

    Reads `file` from its current position. `promised` is False if only the first bytes suggest a
    pickle: then one that no unpickler could read counts as data, since numbers may begin like it.
    """
    data = file.read(min(size, MAX_BYTES))
    at = 0
    for number in range(MAX_STREAMS):
        try:
            at += _measure(data[at:])
        except _Broken as broken:
            # Loading it stops there, too. After the first pickle, the bytes of tensors follow.
            if broken.cut and size > len(data):
                return f"its pickle is longer than {MAX_BYTES // 1024**2} MiB, {UNSEEN}"
            return f"it is an incomplete pickle, {UNSEEN}" if promised and number == 0 else ""
        except _Hazard as hazard:
            return str(hazard)
        if at >= len(data):
            return ""
    return f"it contains more than {MAX_STREAMS} pickles, {UNSEEN}"


class _Hazard(Exception):
    """The pickle must not be loaded; the text says what it would do."""


class _Broken(Exception):
    """Every unpickler stops here, and everything before was harmless. `cut`: bytes are missing."""

    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.cut = cut


def _measure(data: bytes) -> int:
    """Return the length of the harmless pickle that `data` begins with."""
    file = io.BytesIO(data)
    try:
        for called in _list_called(file):
            if called is None:
                raise _Hazard("it would call something that the pickle hides")
            if called not in ALLOWED:
                raise _Hazard(f"loading it would run {'.'.join(called.split(' ', 1))!a}")
    except (ValueError, IndexError, OverflowError, MemoryError) as error:
        cut = any(words in str(error) for words in CUT)
        if isinstance(error, UnicodeDecodeError) or not (cut or NO_STEP in str(error)):
            # An unpickler may be able to read on where pickletools cannot.
            raise _Hazard(f"its pickle cannot be read ({error!s:.60}), {UNSEEN}") from None
        raise _Broken(cut) from None
    return file.tell()


def _list_called(file: BinaryIO) -> Iterator[str | None]:
    """Yield every `module name` that a pickle uses; None where it is known only at load time.

    The top of the stack is known only after a step that puts a text there. Every other step makes
    it unknown, so that no order of steps can make one name look like another.
    """
    top: list[str | None] = []
    memo: dict[int, str | None] = {}
    frame_end = 0
    for code, argument, at in pickletools.genops(file):
        name = code.name
        if name == "FRAME":
            frame_end = max(frame_end, (at or 0) + FRAME_HEAD_BYTES + int(argument or 0))
        if name == "STOP" and (at or 0) + 1 < frame_end:
            # Some unpicklers read a frame at once: for them the next pickle begins after it.
            raise _Hazard(f"its pickle ends before its frame does, {UNSEEN}")
        if len(memo) > MAX_KEPT:
            raise _Hazard(f"its pickle has more than {MAX_KEPT} memo entries, {UNSEEN}")
        if name in _TEXT:
            top.append(str(argument))
        elif name == "MEMOIZE":
            memo[len(memo)] = top[-1] if top else None
        elif name in _KEEP:
            memo[int(argument or 0)] = top[-1] if top else None
        elif name in _FETCH:
            top.append(memo.get(int(argument or 0)))
        else:
            if name in ("GLOBAL", "INST"):
                yield str(argument)
            elif name == "STACK_GLOBAL":
                if len(top) < 2:
                    raise ValueError(f"{NO_STEP}: the stack has nothing to call")
                module, attribute = top[-2:]
                yield (
                    f"{module} {attribute}"
                    if module is not None and attribute is not None
                    else None
                )
            elif name in _REGISTRY and top:
                yield None
            top.append(None)
        del top[:-2]
