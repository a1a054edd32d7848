"""Read a request to /predict: one plain image, a form with files, or JSON with base64."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from .refusals import RefusedError
from .settings import ServeSettings

Receive = Callable[[], Awaitable[Any]]
DATA_URI = re.compile(r"^data:image/[a-z.+-]+;base64,")
HOW = "send an image file (curl -F image=@PICTURE), or JSON: {'image': BASE64} or {'images': [..]}"


async def read_images(request: Request, settings: ServeSettings) -> list[bytes]:
    """Read the images of a request, 1 to `max_images` of them; otherwise RefusedError."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    bounded = Request(request.scope, _limit_body(request, settings.max_body_bytes))
    try:
        images = await asyncio.wait_for(_read(kind, bounded, settings), settings.body_s)
    except asyncio.TimeoutError:
        text = f"the body did not arrive within {settings.body_s:g} s"
        raise RefusedError(408, "slow_body", text) from None
    except ClientDisconnect:
        raise RefusedError(400, "cut_off", "the connection closed during the request") from None
    if not images:
        raise RefusedError(400, "no_image", f"the request has no image; {HOW}")
    if len(images) > settings.max_images:
        text = f"a request may have at most {settings.max_images} images"
        raise RefusedError(413, "too_many", text)
    return images


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


def _from_json(body: bytes, most: int) -> list[bytes]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise RefusedError(400, "bad_json", "the body is not valid JSON") from None
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
