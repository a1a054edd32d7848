"""The HTTP server: POST /predict, GET /healthz, GET /metrics."""

from __future__ import annotations

import asyncio
import os
import time
import traceback
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypedDict

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.middleware.trustedhost import TrustedHostMiddleware

from .batching import Batcher, Item, Row
from .bodies import HOW, describe_rows, read_images, read_rows
from .drift import DriftMonitor
from .metrics import CONTENT_TYPE, Metrics
from .pictures import MemoryBudget, MemoryShare, decode_image
from .project import Model
from .refusals import RefusedError
from .settings import ServeSettings

# number of classes in each prediction, the most probable first
TOP = 5
# Host names of a forward. Requests with another name are refused: a foreign page may point its own
# name at the loopback (DNS rebinding).
OUR_HOSTS = ["127.0.0.1", "localhost"]


_ClassProbability = TypedDict("_ClassProbability", {"class": str, "probability": float})


class _Prediction(_ClassProbability):
    """The most probable class of an image; `top` has it and the next ones."""

    top: list[_ClassProbability]


class _ModelName(TypedDict):
    run: str
    checkpoint: str


class _PredictionsBody(TypedDict):
    """The body of a reply of /predict."""

    predictions: list[_Prediction]
    model: _ModelName


class _RefusalReason(TypedDict):
    reason: str
    message: str


class _RefusalDetails(_RefusalReason, total=False):
    """`image` is the number of the image that caused it, from 0."""

    image: int


class _RefusalBody(TypedDict):
    """The body of a reply of /predict that is an error."""

    error: _RefusalDetails


def _describe_refusal(error: RefusedError) -> _RefusalBody:
    refusal: _RefusalDetails = {"reason": error.reason, "message": error.message}
    if error.image is not None:
        refusal["image"] = error.image
    return {"error": refusal}


class ModelServer:
    """One model behind HTTP. `app` is the ASGI application."""

    def __init__(self, model: Model, settings: ServeSettings, run: str = "") -> None:
        self.model = model
        self.settings = settings
        self.run = run
        self.metrics = Metrics(model.classes, DriftMonitor(model.reference), self._waiting)
        self._budget = MemoryBudget(settings.max_held_bytes)
        self._decoders = ThreadPoolExecutor(os.cpu_count() or 1, "decode")
        self._batcher: Batcher | None = None
        self.app = self._build_app()

    def _build_app(self) -> FastAPI:
        # No documentation pages: they load scripts from other sites.
        app = FastAPI(lifespan=self._lifespan, docs_url=None, redoc_url=None, openapi_url=None)
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=OUR_HOSTS)
        app.add_api_route("/predict", self.predict, methods=["POST"], response_class=Response)
        app.add_api_route("/healthz", self.healthz, methods=["GET"], response_class=Response)
        app.add_api_route("/metrics", self.serve_metrics, methods=["GET"], response_class=Response)
        app.add_api_route("/", self.describe, methods=["GET"], response_class=Response)
        return app

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        self._batcher = Batcher(
            self.model.rows,
            self.metrics.batch,
            max_batch=self.settings.max_batch,
            max_waiting=self.settings.max_waiting,
            wait_s=self.settings.wait_ms / 1000,
        )
        self._batcher.start()
        try:
            yield
        finally:
            await self._batcher.close()
            self._decoders.shutdown(wait=False)

    def _waiting(self) -> int:
        return self._batcher.waiting if self._batcher else 0

    async def predict(self, request: Request) -> Response:
        started_s = time.perf_counter()
        reason = ""
        try:
            with self._budget.share() as share:
                rows = await self._predict_items(request, share)
                body: _PredictionsBody | _RefusalBody = self._describe_rows(rows)
            status = 200
        except RefusedError as error:
            status, reason, body = error.status, error.reason, _describe_refusal(error)
        except BaseException:
            self.metrics.request(500, time.perf_counter() - started_s, "cut_off")
            raise
        self.metrics.request(status, time.perf_counter() - started_s, reason)
        return JSONResponse(body, status, headers={"Retry-After": "1"} if status == 503 else None)

    async def _read_items(self, request: Request, share: MemoryShare) -> list[Item]:
        share.take(self._announced_bytes(request))
        if self.model.columns:
            return [*await read_rows(request, self.settings, self.model.columns)]
        contents = await read_images(request, self.settings)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._decoders, self._decode_images, contents, share)

    async def _predict_items(self, request: Request, share: MemoryShare) -> list[Row]:
        items = await self._read_items(request, share)
        batcher = self._batcher
        if batcher is None:
            raise RefusedError(503, "stopping", "the server is not ready")
        (result,) = await asyncio.gather(batcher.predict(items), return_exceptions=True)
        if isinstance(result, RefusedError):
            raise result
        if isinstance(result, BaseException):
            # The project's own error text goes to the log, not to callers.
            traceback.print_exception(result)
            raise RefusedError(500, "model_failed", "the model failed; see the server's log")
        return result

    def _announced_bytes(self, request: Request) -> int:
        """Return the body's announced size in bytes, or the limit if it was not announced."""
        length = request.headers.get("content-length", "")
        largest = self.settings.max_body_bytes
        return min(int(length), largest) if length.isdigit() else largest

    def _decode_images(self, contents: list[bytes], share: MemoryShare) -> list[Item]:
        most = self.settings.max_pixels
        return [decode_image(one, number, most, share) for number, one in enumerate(contents)]

    def _describe_rows(self, rows: list[Row]) -> _PredictionsBody:
        return {
            "predictions": [self._describe_row(row) for row in rows],
            "model": self._model_name(),
        }

    def _describe_row(self, row: Row) -> _Prediction:
        order = sorted(range(len(row)), key=lambda number: -row[number])[:TOP]
        self.metrics.prediction(order[0])
        top: list[_ClassProbability] = [
            {"class": self.model.classes[number], "probability": row[number]} for number in order
        ]
        return {**top[0], "top": top}

    def _model_name(self) -> _ModelName:
        return {"run": self.run, "checkpoint": self.model.checkpoint}

    async def healthz(self) -> Response:
        alive = self._batcher is not None and self._batcher.alive
        columns = {"columns": self.model.columns} if self.model.columns else {}
        body = {
            "status": "ok" if alive else "failed",
            "model": {**self._model_name(), "classes": len(self.model.classes), **columns},
            "max_batch": self.settings.max_batch,
            "drift": "measured" if self.model.reference else "not measured",
        }
        return JSONResponse(body, 200 if alive else 503)

    async def serve_metrics(self) -> Response:
        return Response(self.metrics.text(), media_type=CONTENT_TYPE)

    async def describe(self) -> Response:
        how = describe_rows(self.model.columns) if self.model.columns else HOW
        body = {"POST /predict": how, "GET": ["/healthz", "/metrics"], "model": self._model_name()}
        return JSONResponse(body)
