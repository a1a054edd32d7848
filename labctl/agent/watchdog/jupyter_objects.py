"""Objects of Jupyter's REST API, as far as the watchdog reads them."""

from typing import NamedTuple


class JupyterKernel(NamedTuple):
    """A kernel. `last_activity` is text such as "2026-01-02T03:04:05.000000Z"."""

    execution_state: str = ""
    last_activity: str = ""
