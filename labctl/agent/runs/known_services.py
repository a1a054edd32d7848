"""The services that labctl can start: script, port, and a test for whether an image has them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from . import serve

LINK_EVERY_S = 2
TOKEN_FILE = "/run/labctl-service/token"


def build_tensorboard(runs: str, links: str, host: str) -> str:
    """Return the script of TensorBoard, which reads only the logs of each run.

    It shows each of `runs` under its id, by links in `links`. These are words for the shell.
    """
    return f"""
link() {{
  for logs in {runs}/*/logs; do
    [ -d "$logs" ] || continue
    run=${{logs%/logs}}; run=${{run##*/}}
    [ -e "{links}/$run" ] || ln -sfn "$logs" "{links}/$run"
  done
}}
mkdir -p {links}; link
(while sleep {LINK_EVERY_S}; do link; done) &
exec tensorboard --logdir {links} --host {host} --port "$1" --reload_interval 5
"""


def build_jupyter(lab: str, host: str) -> str:
    """Return the script of Jupyter in the directory `lab`, a word for the shell.

    Jupyter answers only for the host names 127.0.0.1 and localhost, which a forward uses: a hostile
    page cannot reach it through a name that resolves to the loopback. The token is in a file.
    """
    return f"""
exec jupyter lab --no-browser --ip {host} --port "$1" --ServerApp.port_retries=0 \\
  --ServerApp.root_dir={lab} --ServerApp.preferred_dir={lab}/code \\
  --ServerApp.allow_remote_access=False
"""


def build_mlflow(runs: str, view: str, host: str) -> str:
    """Return the script of MLflow's server, which shows the databases of all runs in one.

    That is made anew at each start in the directory `view`. Both are words for the shell. The
    server answers for localhost and private addresses only, as a protection against DNS rebinding.
    """
    program = Path(__file__).with_name("mlflow_view.py").read_text()
    return f"""
rm -rf {view}; mkdir -p {view}
cat >{view}/mlflow_view.py <<'LABCTL_END'
{program}
LABCTL_END
(exec python3 {view}/mlflow_view.py {runs} {view}/mlflow.db) &
cd {view}
exec mlflow server --backend-store-uri sqlite:///{view}/mlflow.db \\
  --default-artifact-root file://{view}/artifacts --workers 1 --host {host} --port "$1"
"""


TENSORBOARD = build_tensorboard("/lab/runs", "/tmp/runs", "0.0.0.0")
JUPYTER = build_jupyter("/lab", "0.0.0.0")
MLFLOW = build_mlflow("/lab/runs", "/tmp/mlflow", "0.0.0.0")


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
    "mlflow": KnownService(MLFLOW, 5000, "/", "command -v mlflow && command -v python3"),
    serve.NAME: KnownService(serve.SCRIPT, serve.PORT, "/", serve.TEST),
}
