"""What a pickle would do when it is loaded, told without loading it.

A pickle is a program: `torch.load` and `joblib.load` run it. What it may name is listed here; one
that names anything else is refused, and so is one that cannot be read to its end. Whoever loads a
stranger's pickle still does so in a container: `weights_only=True` is no sandbox.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Iterator
from typing import BinaryIO

MOST_BYTES = 64 * 1024 * 1024
"""Of one pickle; PyTorch keeps tensors outside of it."""
MOST_STREAMS = 16
UNREADABLE = "it is no whole pickle"
SUFFIXES = frozenset(
    (".pkl", ".pickle", ".pt", ".pth", ".joblib", ".dill", ".sav", ".ckpt", ".p7", ".pck")
)
"""What such a name promises must be read to be believed."""
ALLOWED = frozenset(
    f"{module} {name}"
    for module, names in {
        "builtins": "set frozenset bytearray complex slice range dict list tuple",
        "__builtin__": "set frozenset bytearray complex slice xrange range dict list tuple",
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
OBJECT = frozenset(("builtins object", "__builtin__ object"))
"""What `copyreg._reconstructor` makes a plain object of."""
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


def hazard(file: BinaryIO, size: int, *, promised: bool) -> str:
    """Why the pickle that begins here must not be loaded; "" where it names tensors and data only.

    Reads `file` from where it is. Where nothing but the first bytes `promised` a pickle, one that
    is none is none: numbers may begin as it does.
    """
    if size > MOST_BYTES:
        return f"its pickle is larger than {MOST_BYTES // 1024**2} MiB, and cannot be looked into"
    data = file.read(size)
    at = 0
    for number in range(MOST_STREAMS):
        said, length = _stream(data[at:])
        if said:
            # What follows the first may be anything: the bytes of tensors, say.
            readable = not said.startswith(UNREADABLE)
            return said if readable or (promised and number == 0) else ""
        at += length
        if not is_pickle(data[at : at + 3]):
            return ""
    return f"it holds more than {MOST_STREAMS} pickles"


def _stream(data: bytes) -> tuple[str, int]:
    """(what is wrong, how long it is) of the pickle that `data` begins with."""
    file = io.BytesIO(data)
    try:
        for called in _called(file):
            if called is None:
                return "it would call something that its pickle hides", 0
            if called not in ALLOWED and called not in OBJECT:
                name = ".".join(called.split(" ", 1))
                return f"loading it would run {name!a}", 0
    except (ValueError, IndexError, OverflowError, MemoryError) as error:
        return f"{UNREADABLE}, and cannot be looked into ({error!s:.60})", 0
    return "", file.tell()


def _called(file: BinaryIO) -> Iterator[str | None]:
    """Every `module name` that a pickle asks for; None where nobody can tell before it runs.

    Knows the top of the stack only after what puts a text there: whatever else happens in between
    makes it unknown, so that no order of steps makes one name look like another.
    """
    top: list[str | None] = []
    kept: dict[int, str | None] = {}
    for code, argument, _ in pickletools.genops(file):
        name = code.name
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
                module, wanted = top[-2:] if len(top) >= 2 else (None, None)
                yield f"{module} {wanted}" if module is not None and wanted is not None else None
            elif name in _REGISTRY:
                yield None
            top.append(None)
        del top[:-2]
