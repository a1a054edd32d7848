"""The HTTP server: POST /predict, GET /healthz, GET /metrics."""

from __future__ import annotations

import asyncio
import os
import time
import traceback
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from PIL.Image import Image
from starlette.middleware.trustedhost import TrustedHostMiddleware

from .batching import Batcher
from .bodies import HOW, images_in
from .drift import Watch
from .metrics import CONTENT_TYPE, Metrics
from .pictures import Budget, Share, unpacked
from .project import Model
from .refusals import RefusedError
from .settings import Settings

# So many classes are told of each image, the most probable first.
TOP = 5
# How a forward calls it; a page of somebody else's, which points a name of its own at the loopback,
# is not answered.
OUR_HOSTS = ["127.0.0.1", "localhost"]


class Server:
    """One model behind HTTP. `app` is the ASGI application."""

    def __init__(self, model: Model, settings: Settings, run: str = "") -> None:
        self.model = model
        self.settings = settings
        self.run = run
        self.metrics = Metrics(model.classes, Watch(model.reference), self._waiting)
        self._budget = Budget(settings.max_held_bytes)
        self._decoders = ThreadPoolExecutor(os.cpu_count() or 1, "decode")
        self._batcher: Batcher | None = None
        self.app = self._application()

    def _application(self) -> FastAPI:
        # No pages of documentation: they fetch scripts from elsewhere.
        app = FastAPI(lifespan=self._life, docs_url=None, redoc_url=None, openapi_url=None)
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=OUR_HOSTS)
        app.add_api_route("/predict", self.predict, methods=["POST"], response_class=Response)
        app.add_api_route("/healthz", self.healthz, methods=["GET"], response_class=Response)
        app.add_api_route("/metrics", self.told, methods=["GET"], response_class=Response)
        app.add_api_route("/", self.about, methods=["GET"], response_class=Response)
        return app

    @asynccontextmanager
    async def _life(self, _: FastAPI) -> AsyncIterator[None]:
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
        begun = time.perf_counter()
        reason = ""
        try:
            with self._budget.share() as share:
                status, body = 200, await self._predicted(request, share)
        except RefusedError as error:
            status, reason = error.status, error.reason
            body = {"error": {"reason": reason, "message": error.message}}
            if error.image is not None:
                body["error"]["image"] = error.image
        except BaseException:
            self.metrics.request(500, time.perf_counter() - begun, "cut_off")
            raise
        self.metrics.request(status, time.perf_counter() - begun, reason)
        return JSONResponse(body, status, headers={"Retry-After": "1"} if status == 503 else None)

    async def _predicted(self, request: Request, share: Share) -> dict[str, Any]:
        share.take(self._announced(request))
        contents = await images_in(request, self.settings)
        loop = asyncio.get_running_loop()
        images = await loop.run_in_executor(self._decoders, self._unpacked, contents, share)
        batcher = self._batcher
        if batcher is None:
            raise RefusedError(503, "stopping", "the server is not ready")
        (found,) = await asyncio.gather(batcher.answers(images), return_exceptions=True)
        if isinstance(found, RefusedError):
            raise found
        if isinstance(found, BaseException):
            # The project's own words are for whoever reads the log, not for callers.
            traceback.print_exception(found)
            raise RefusedError(500, "model_failed", "the model failed; its log says why")
        return {"predictions": [self._prediction(row) for row in found], "model": self._name()}

    def _announced(self, request: Request) -> int:
        """What a body will take, or may at most where the caller does not say."""
        told = request.headers.get("content-length", "")
        largest = self.settings.max_body_bytes
        return min(int(told), largest) if told.isdigit() else largest

    def _unpacked(self, contents: list[bytes], share: Share) -> list[Image]:
        most = self.settings.max_pixels
        return [unpacked(one, number, most, share) for number, one in enumerate(contents)]

    def _prediction(self, row: list[float]) -> dict[str, Any]:
        order = sorted(range(len(row)), key=lambda number: -row[number])[:TOP]
        self.metrics.prediction(order[0])
        top = [{"class": self.model.classes[n], "probability": row[n]} for n in order]
        return {**top[0], "top": top}

    def _name(self) -> dict[str, str]:
        return {"run": self.run, "checkpoint": self.model.checkpoint}

    async def healthz(self) -> Response:
        alive = self._batcher is not None and self._batcher.alive
        body = {
            "status": "ok" if alive else "failed",
            "model": {**self._name(), "classes": len(self.model.classes)},
            "max_batch": self.settings.max_batch,
            "drift": "measured" if self.model.reference else "not measured",
        }
        return JSONResponse(body, 200 if alive else 503)

    async def told(self) -> Response:
        return Response(self.metrics.text(), media_type=CONTENT_TYPE)

    async def about(self) -> Response:
        body = {"POST /predict": HOW, "GET": ["/healthz", "/metrics"], "model": self._name()}
        return JSONResponse(body)
