"""The cells of a student's notebook, as text and images: nothing of it is ever active.

HTML, SVG, JavaScript and widgets are left out; the format asks for a text beside each of them.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from labctl.courses.grading.results import clean_text
from labctl.decoding import decode_json
from labctl.model import Value

MOST_CELLS = 500
# characters of a cell's source, and of an output
MOST_CHARS = 40_000
# characters of a notebook
MOST_TEXT_CHARS = 1_000_000
MOST_OUTPUTS = 50
# bytes of all images of a notebook
MOST_IMAGE_BYTES = 8 * 1024**2
# type -> the bytes that such an image begins with
IMAGES = {"image/png": b"\x89PNG\r\n\x1a\n", "image/jpeg": b"\xff\xd8\xff"}
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class CellOutput(Value, frozen=True):
    """An output of a cell: a `text`, or the address of an `image` (data:)."""

    text: str = ""
    image: str = ""


class RenderedCell(Value, frozen=True):
    """A cell; cells count from 1, as comments on them do."""

    number: int
    kind: Literal["code", "markdown", "raw"]
    source: str
    outputs: tuple[CellOutput, ...] = ()


class _StoredOutput(msgspec.Struct):
    output_type: str = ""
    text: str | list[str] = ""
    data: dict[str, msgspec.Raw] = msgspec.field(default_factory=dict)
    ename: str = ""
    evalue: str = ""
    traceback: list[str] = msgspec.field(default_factory=list)


class _StoredCell(msgspec.Struct):
    cell_type: Literal["code", "markdown", "raw"] = "raw"
    source: str | list[str] = ""
    outputs: list[_StoredOutput] = msgspec.field(default_factory=list)


class _Notebook(msgspec.Struct):
    cells: list[_StoredCell]


# A text in a notebook is a string, or a list of its lines.
_TEXT = msgspec.json.Decoder(str | list[str])


def parse_notebook(content: bytes) -> tuple[RenderedCell, ...]:
    """Return the cells of a notebook in format 4; ValueError if it is not one."""
    try:
        notebook = decode_json(content, _Notebook)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is not a notebook in format 4: {error}") from None
    room = _Room()
    return tuple(
        RenderedCell(
            number=number,
            kind=cell.cell_type,
            source=room.cut("".join(cell.source)),
            outputs=tuple(
                shown
                for output in cell.outputs[:MOST_OUTPUTS]
                if (shown := _convert_output(output, room)) is not None
            ),
        )
        for number, cell in enumerate(notebook.cells[:MOST_CELLS], 1)
    )


class _Room:
    """How much more of a notebook is shown."""

    def __init__(self) -> None:
        self._image_bytes = MOST_IMAGE_BYTES
        self._chars = MOST_TEXT_CHARS

    def has_for_image(self, size: int) -> bool:
        """Tell whether an image is shown, which takes its room."""
        if size > self._image_bytes:
            return False
        self._image_bytes -= size
        return True

    def cut(self, text: str) -> str:
        """Return the part of a text that is shown."""
        shown = clean_text(text, min(MOST_CHARS, self._chars)) if self._chars else "[cut]"
        self._chars = max(0, self._chars - len(shown))
        return shown


def _convert_output(output: _StoredOutput, room: _Room) -> CellOutput | None:
    if output.output_type == "stream":
        return _make_text("".join(output.text), room)
    if output.output_type == "error":
        lines = output.traceback or [f"{output.ename}: {output.evalue}"]
        return _make_text("\n".join(lines), room)
    for kind, beginning in IMAGES.items():
        image = _decode_image(output.data.get(kind), beginning)
        if image is None:
            continue
        if not room.has_for_image(len(image)):
            return CellOutput(text="[this image is not shown: the notebook's images are too large]")
        return CellOutput(image=f"data:{kind};base64,{base64.b64encode(image).decode()}")
    text = _decode_text(output.data)
    if text or not output.data:
        return _make_text(text, room) if text else None
    return CellOutput(text=f"[not shown here: {', '.join(sorted(output.data))[:200]}]")


def _make_text(text: str, room: _Room) -> CellOutput:
    return CellOutput(text=room.cut(_ESCAPES.sub("", text)))


def _decode_text(data: Mapping[str, msgspec.Raw]) -> str:
    try:
        text = _TEXT.decode(data.get("text/plain", b'""'))
    except msgspec.MsgspecError:
        return ""
    return "".join(text)


def _decode_image(raw: msgspec.Raw | None, beginning: bytes) -> bytes | None:
    """Return the bytes of an image; None without one, or for something else."""
    if raw is None:
        return None
    try:
        text = "".join(_TEXT.decode(raw))
        image = base64.b64decode("".join(text.split()), validate=True)
    except (msgspec.MsgspecError, binascii.Error, ValueError):
        return None
    return image if image.startswith(beginning) else None
