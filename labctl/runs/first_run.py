"""The first run of an image on a server: get the image there while code and data are pushed.

A later run only pushes. If the image is missing after all, the agent's reply names it.
"""

from __future__ import annotations

from labctl.events import report_part
from labctl.model import Server
from labctl.parallel import run_parts, wait_for
from labctl.runs import images
from labctl.servers.context import LabContext
from labctl.sync import lab_files
from labctl.sync.transfer_lock import share_transfers


def has_run_on_server(context: LabContext, server: Server, image: str) -> bool:
    """Return whether this machine's record has a run of the lab with this image on the server."""
    return any(
        run.image == image and run.server_id == server.id
        for run in context.state.list_runs(context.lab_id)
    )


def push_with_image(context: LabContext, server: Server, image: str) -> None:
    """Push code and data, and get the run's image onto the server at the same time.

    The first error stops everything. The next push continues from the files transferred by then.
    """
    parts = {
        "code": lambda: lab_files.push_code(context, server, force=False),
        "data": lambda: lab_files.push_data(context, server),
    }
    # The machine of a job finds its image by itself.
    if image and not context.config.job_image:
        parts["image"] = lambda: _provide_image(context, server, image)
    with share_transfers():
        run_parts(parts)


def _provide_image(context: LabContext, server: Server, image: str) -> None:
    with report_part(context.reporter, "image"):
        images.ensure_image(
            context,
            server,
            context.open_agent(server),
            image,
            # A build copies the code into the image; other sources of the image need not wait.
            before_build=lambda: wait_for("code"),
        )
