"""The services that labctl can start: script, port, and a test for whether an image has them."""

from __future__ import annotations

from typing import NamedTuple

from . import serve

LINK_EVERY_S = 2
TOKEN_FILE = "/run/labctl-service/token"

# Shows each run under its id, and reads only the logs directory of each run.
TENSORBOARD = f"""
link() {{
  for logs in /lab/runs/*/logs; do
    [ -d "$logs" ] || continue
    run=${{logs%/logs}}; run=${{run##*/}}
    [ -e "/tmp/runs/$run" ] || ln -sfn "$logs" "/tmp/runs/$run"
  done
}}
mkdir -p /tmp/runs; link
(while sleep {LINK_EVERY_S}; do link; done) &
exec tensorboard --logdir /tmp/runs --host 0.0.0.0 --port "$1" --reload_interval 5
"""
# Jupyter answers only for the host names 127.0.0.1 and localhost, which a forward uses: a hostile
# page cannot reach it through a name that resolves to the loopback. The token is in a file.
JUPYTER = """
exec jupyter lab --no-browser --ip 0.0.0.0 --port "$1" --ServerApp.port_retries=0 \\
  --ServerApp.root_dir=/lab --ServerApp.preferred_dir=/lab/code \\
  --ServerApp.allow_remote_access=False
"""


class KnownService(NamedTuple):
    """A service that labctl can start.

    `script` gets the port as $1. `path` is that of its page. `test` succeeds in an image that has
    the service's programs.
    """

    script: str
    port: int
    path: str
    test: str


KNOWN = {
    "tensorboard": KnownService(TENSORBOARD, 6006, "/", "command -v tensorboard"),
    "jupyter": KnownService(
        JUPYTER,
        8888,
        "/lab",
        "command -v jupyter-lab && jupyter server --version | "
        "{ IFS=. read -r major minor rest; "
        '[ "$major" -gt 2 ] || { [ "$major" -eq 2 ] && [ "$minor" -ge 20 ]; }; }',
    ),
    serve.NAME: KnownService(serve.SCRIPT, serve.PORT, "/", serve.TEST),
}
