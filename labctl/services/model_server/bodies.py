"""What is in a request to /predict: one image as it is, a form with files, or JSON with base64."""

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
from .settings import Settings

Receive = Callable[[], Awaitable[Any]]
DATA_URI = re.compile(r"^data:image/[a-z.+-]+;base64,")
HOW = "send an image file (curl -F image=@PICTURE), or JSON: {'image': BASE64} or {'images': [..]}"


async def images_in(request: Request, settings: Settings) -> list[bytes]:
    """The files in a request, at least one and at most `max_images`; RefusedError otherwise."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    bounded = Request(request.scope, _bounded(request, settings.max_body_bytes))
    try:
        found = await asyncio.wait_for(_read(kind, bounded, settings), settings.body_s)
    except asyncio.TimeoutError:
        text = f"the body did not arrive within {settings.body_s:g} s"
        raise RefusedError(408, "slow_body", text) from None
    except ClientDisconnect:
        raise RefusedError(400, "cut_off", "the body ended before its end") from None
    if not found:
        raise RefusedError(400, "no_image", f"there is no image in it; {HOW}")
    if len(found) > settings.max_images:
        text = f"one request may hold {settings.max_images} images"
        raise RefusedError(413, "too_many", text)
    return found


async def _read(kind: str, request: Request, settings: Settings) -> list[bytes]:
    if kind == "multipart/form-data":
        return await _files(request, settings)
    if kind == "application/json":
        # In a thread: to read a large one takes so long that others would notice.
        return await asyncio.to_thread(_from_json, await request.body(), settings.max_images)
    if kind.startswith("image/") or kind == "application/octet-stream":
        body = await request.body()
        return [body] if body else []
    raise RefusedError(415, "unknown_type", f"{kind or 'no type'!r} is not read; {HOW}")


def _bounded(request: Request, largest: int) -> Receive:
    """The request's `receive`, which refuses to hand on more than so many bytes."""
    told = request.headers.get("content-length", "")
    came = int(told) if told.isdigit() else 0
    if came > largest:
        raise _too_large(largest)
    received = 0

    async def receive() -> Any:
        nonlocal received
        message = await request.receive()
        received += len(message.get("body", b""))
        if received > largest:
            raise _too_large(largest)
        return message

    return receive


def _too_large(largest: int) -> RefusedError:
    return RefusedError(413, "too_large", f"a request may have {largest} bytes")


async def _files(request: Request, settings: Settings) -> list[bytes]:
    # One more than is allowed, so that `images_in` says what is wrong.
    most = settings.max_images + 1
    try:
        form = await request.form(max_files=most, max_fields=most)
    except HTTPException as error:
        reason = "too_many" if "Too many" in str(error.detail) else "bad_form"
        status = 413 if reason == "too_many" else 400
        raise RefusedError(status, reason, f"this form cannot be read: {error.detail}") from None
    try:
        sent = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
        return [await one.read() for one in sent]
    finally:
        await form.close()


def _from_json(body: bytes, most: int) -> list[bytes]:
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):
        raise RefusedError(400, "bad_json", "this is not JSON") from None
    texts = told.get("images", [told.get("image")]) if isinstance(told, dict) else None
    if not isinstance(texts, list) or not all(isinstance(one, str) for one in texts):
        text = "it must be {'image': BASE64} or {'images': [BASE64, ...]}"
        raise RefusedError(400, "bad_json", text)
    if len(texts) > most:
        raise RefusedError(413, "too_many", f"one request may hold {most} images")
    return [_decoded(one, number) for number, one in enumerate(texts)]


def _decoded(text: str, number: int) -> bytes:
    try:
        return base64.b64decode(DATA_URI.sub("", text, count=1), validate=True)
    except (binascii.Error, ValueError):
        raise RefusedError(400, "bad_base64", "this is not base64", image=number) from None
