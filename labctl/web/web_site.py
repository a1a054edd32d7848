"""An ASGI application with tasks of its own, which `http_server` serves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response
from starlette.middleware import Middleware

# path -> what answers there
Routes = Mapping[str, Callable[..., Any]]


class WebSite:
    """An application, `app`, without routes. It calls `on_start` once it can answer."""

    def __init__(self, middleware: Sequence[Middleware]) -> None:
        self.on_start: list[Callable[[], None]] = []
        self.start_error: Exception | None = None
        self.app = FastAPI(
            lifespan=self._run_tasks,
            middleware=middleware,
            # No API documentation: its pages fetch scripts from other hosts.
            docs_url=None,
            redoc_url=None,
            openapi_url=None,
        )

    def close(self) -> None:
        """End every stream, from any thread."""
        raise NotImplementedError

    def list_tasks(self) -> list[Coroutine[Any, Any, None]]:
        """List what runs as long as the application does."""
        raise NotImplementedError

    async def prepare(self) -> None:
        """Do what must be done before the first request."""

    async def finish(self) -> None:
        """Release what the requests used."""

    @contextlib.asynccontextmanager
    async def _run_tasks(self, _: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(work) for work in self.list_tasks()]
        try:
            await self.prepare()
            for call in self.on_start:
                call()
            yield
        except Exception as error:
            self.start_error = error
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.finish()


def add_routes(app: FastAPI, method: str, routes: Routes) -> None:
    for path, handler in routes.items():
        app.add_api_route(path, handler, methods=[method], response_class=Response)
