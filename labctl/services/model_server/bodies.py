"""Read a request to /predict: one plain image, a form with files, JSON with base64, or rows."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import math
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from .refusals import RefusedError
from .settings import ServeSettings

Receive = Callable[[], Awaitable[Any]]
Content = TypeVar("Content")
# The largest number of 32 bits, which models of tables compute with.
LARGEST = 3.4e38
DATA_URI = re.compile(r"^data:image/[a-z.+-]+;base64,")
HOW = "send an image file (curl -F image=@PICTURE), or JSON: {'image': BASE64} or {'images': [..]}"


async def read_images(request: Request, settings: ServeSettings) -> list[bytes]:
    """Read the images of a request, 1 to `max_images` of them; otherwise RefusedError."""
    images = await _read_in_time(request, settings, _read)
    if not images:
        raise RefusedError(400, "no_image", f"the request has no image; {HOW}")
    if len(images) > settings.max_images:
        text = f"a request may have at most {settings.max_images} images"
        raise RefusedError(413, "too_many", text)
    return images


async def read_rows(
    request: Request, settings: ServeSettings, columns: tuple[str, ...]
) -> list[list[float]]:
    """Read the rows of a request, each with a number (or NaN) for each of these columns."""

    async def read(kind: str, bounded: Request, settings: ServeSettings) -> list[list[float]]:
        if kind != "application/json":
            text = f"unsupported content type {kind!r}; {describe_rows(columns)}"
            raise RefusedError(415, "unknown_type", text)
        body = await bounded.body()
        return await asyncio.to_thread(_parse_rows, body, columns, settings.max_images)

    return await _read_in_time(request, settings, read)


def describe_rows(columns: tuple[str, ...]) -> str:
    return f"send JSON: {{'rows': [[...]]}} with {len(columns)} numbers: {', '.join(columns)}"


async def _read_in_time(
    request: Request, settings: ServeSettings, read: Callable[..., Awaitable[list[Content]]]
) -> list[Content]:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    bounded = Request(request.scope, _limit_body(request, settings.max_body_bytes))
    try:
        return await asyncio.wait_for(read(kind, bounded, settings), settings.body_s)
    except asyncio.TimeoutError:
        text = f"the body did not arrive within {settings.body_s:g} s"
        raise RefusedError(408, "slow_body", text) from None
    except ClientDisconnect:
        raise RefusedError(400, "cut_off", "the connection closed during the request") from None


async def _read(kind: str, request: Request, settings: ServeSettings) -> list[bytes]:
    if kind == "multipart/form-data":
        return await _read_files(request, settings)
    if kind == "application/json":
        # In a thread: parsing a large body would delay other requests.
        return await asyncio.to_thread(_from_json, await request.body(), settings.max_images)
    if kind.startswith("image/") or kind == "application/octet-stream":
        body = await request.body()
        return [body] if body else []
    raise RefusedError(415, "unknown_type", f"unsupported content type {kind!r}; {HOW}")


def _limit_body(request: Request, largest: int) -> Receive:
    """Wrap the request's `receive` so that it refuses bodies of more than `largest` bytes."""
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > largest:
        raise _make_too_large_error(largest)
    received = 0

    async def receive() -> Any:
        nonlocal received
        message = await request.receive()
        received += len(message.get("body", b""))
        if received > largest:
            raise _make_too_large_error(largest)
        return message

    return receive


def _make_too_large_error(largest: int) -> RefusedError:
    return RefusedError(413, "too_large", f"a request may have at most {largest} bytes")


async def _read_files(request: Request, settings: ServeSettings) -> list[bytes]:
    # One more than allowed, so that `read_images` reports the limit.
    most = settings.max_images + 1
    try:
        form = await request.form(max_files=most, max_fields=most)
    except HTTPException as error:
        # Starlette raises status 400 for every invalid form.
        reason = "too_many" if "Too many" in str(error.detail) else "bad_form"
        status = 413 if reason == "too_many" else 400
        raise RefusedError(status, reason, f"invalid form: {error.detail}") from None
    try:
        uploads = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
        return [await upload.read() for upload in uploads]
    finally:
        await form.close()


def _parse_json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise RefusedError(400, "bad_json", "the body is not valid JSON") from None


def _parse_rows(body: bytes, columns: tuple[str, ...], most: int) -> list[list[float]]:
    value = _parse_json(body)
    rows = value.get("rows") if isinstance(value, dict) else None
    if not isinstance(rows, list) or not rows:
        raise RefusedError(400, "no_rows", f"the request has no rows; {describe_rows(columns)}")
    if len(rows) > most:
        raise RefusedError(413, "too_many", f"a request may have at most {most} rows")
    return [_parse_row(row, columns, number) for number, row in enumerate(rows)]


def _parse_row(row: object, columns: tuple[str, ...], number: int) -> list[float]:
    """Parse a list of numbers, or an object with the names of columns; null is a missing value."""
    if isinstance(row, dict):
        row = [row.get(name) for name in columns] if set(row) <= set(columns) else None
    if not isinstance(row, list) or len(row) != len(columns):
        raise RefusedError(422, "bad_row", f"row {number}: {describe_rows(columns)}")
    values = [math.nan if cell is None else cell for cell in row]
    if not all(_is_number(cell) for cell in values):
        raise RefusedError(422, "bad_row", f"row {number} has a value that is not a number")
    return [float(cell) for cell in values]


def _is_number(cell: object) -> bool:
    """Whether it is a number that fits into 32 bits, or NaN. True and False are none."""
    if isinstance(cell, bool) or not isinstance(cell, (int, float)):
        return False
    is_nan = cell != cell  # math.isnan would convert integers of any size
    return abs(cell) < LARGEST or is_nan


def _from_json(body: bytes, most: int) -> list[bytes]:
    value = _parse_json(body)
    texts = value.get("images", [value.get("image")]) if isinstance(value, dict) else None
    if not isinstance(texts, list) or not all(isinstance(content, str) for content in texts):
        text = "expected {'image': BASE64} or {'images': [BASE64, ...]}"
        raise RefusedError(400, "bad_json", text)
    if len(texts) > most:
        raise RefusedError(413, "too_many", f"a request may have at most {most} images")
    return [_decode(content, number) for number, content in enumerate(texts)]


def _decode(text: str, number: int) -> bytes:
    try:
        return base64.b64decode(DATA_URI.sub("", text, count=1), validate=True)
    except (binascii.Error, ValueError):
        raise RefusedError(400, "bad_base64", "not valid base64", image=number) from None
