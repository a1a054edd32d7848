"""Run in the project's directory: load its model, then answer requests."""

from __future__ import annotations

import os
import platform
import signal
import sys
from pathlib import Path

import uvicorn

from .app import ModelServer
from .checkpoint import refuse_pickles
from .project import load
from .refusals import ModelError
from .settings import SettingError, read_environment

REFUSED = 3
OLDEST = (3, 10)
MOST_CONNECTIONS = 512


def main() -> int:
    if sys.version_info < OLDEST:
        print(f"refused: the image has Python {platform.python_version()}; 3.10 or newer is needed")
        return REFUSED
    sys.path.insert(0, str(Path.cwd()))
    try:
        settings = read_environment(os.environ)
        refuse_pickles()
        model = load(settings.checkpoints)
    except (ModelError, SettingError) as error:
        print(f"refused: {error}", file=sys.stderr, flush=True)
        return REFUSED
    server = ModelServer(model, settings, os.environ.get("LABCTL_RUN_ID", ""))
    print(f"serving {model.checkpoint}, {len(model.classes)} classes", flush=True)
    # uvicorn installs its own handler while it serves. After an orderly stop it sends itself the
    # signal once more, which must not turn the stop into a failure.
    signal.signal(signal.SIGTERM, lambda *_: None)
    uvicorn.run(
        server.app,
        host=settings.host,
        port=settings.port,
        access_log=False,
        log_level="warning",
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=round(settings.stop_s),
    )
    print("stopped", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
