"""The door: `python3 __main__.py VERB`, one JSON line in, one marked JSON line out."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

from .place import home
from .reply import Failure, answer, finish
from .shared import BROKER, brokered

ANSWERING = {
    "start": "runs.start",
    "status": "looks.status",
    "cancel": "runs.cancel",
    "resume": "resume.resume",
    "restore-pushed": "resume.from_push",
    "clear": "runs.clear",
    "session": "runs.session",
    "evaluate": "evaluation.evaluate",
    "grade": "grading.grade",
    "grade-check": "grading.check",
    "grade-clear": "grading.clear",
    "plan": "files.plan",
    "commit": "files.commit",
    "edits": "edits.edits",
    "hashes": "contents.hashes",
    "manifest": "outputs.manifest",
    "image": "images.present",
    "service": "services.start",
    "services": "services.status",
    "service-stop": "services.stop",
    "pulled": "watch_saved.pulled",
    "restore": "restored.restore",
    "guard": "watch_install.guard",
    "watch": "watch_place.watch",
    "reload-units": "systemd_reload.reload_units",
    "extend": "watch_install.extend",
    "reclaim-notice": "watch_reclaim.notice",
    "reclaimed": "watch_taken.reclaimed",
    "keep-disk": "watch_disk.keep_disk",
    "store": "store.prepare",
    "store-boto3": "boto3_python.install_boto3",
    "store-probe": "store.probe",
    "mirror-now": "store_mirror.mirror_now",
    "restore-run": "store_restore.restore",
}
STREAMING = {
    "follow": "follow.follow",
    "run": "follow.start_and_follow",
    "send": "contents.send",
    "build": "images.build",
    "pull-image": "images.pull",
    "service-image": "services.build",
    "fetch": "fetch.fetch",
    "watchdog": "watchdog.run",
    "telemetry": "telemetry.record",
    "top": "top.top",
    "mirror-serve": "store_mirror.serve",
    "broker": "broker.run",
}
"""Verb -> module and function. Imports are waited for, so only the verb's own module is one."""
LOOKING = (
    "status",
    "manifest",
    "edits",
    "image",
    "services",
    "watch",
    "pulled",
    "follow",
    "watchdog",
    "telemetry",
    "reload-units",
    "top",
    "keep-disk",
    "reclaim-notice",
    "reclaimed",
    "store-probe",
    "mirror-now",
    "mirror-serve",
    "broker",
)
"""Verbs that need nobody at work; the others show that a server is in use."""


def _deed(name: str) -> Callable[[dict[str, Any]], Any]:
    module, _, function = name.partition(".")
    found: Callable[[dict[str, Any]], Any] = getattr(
        import_module(f".{module}", __package__), function
    )
    return found


def _used() -> None:
    """For watch_signs.used; not worth a failure."""
    with suppress(OSError):
        (home() / ".used").touch()


def main() -> int:
    verb = sys.argv[1] if len(sys.argv) > 1 else ""
    if brokered():
        # For the docker command and the terminals that this starts, too.
        os.environ["DOCKER_HOST"] = f"unix://{BROKER}"
    if verb not in LOOKING:
        _used()
    request = json.loads(sys.stdin.buffer.readline() or b"{}")
    try:
        if verb in STREAMING:
            _deed(STREAMING[verb])(request)
        elif verb in ANSWERING:
            answer(_deed(ANSWERING[verb])(request))
        else:
            raise Failure("usage", f"the server's program knows no verb {verb!r}")
    except Failure as failure:
        finish({"error": failure.body})
        return 1
    except BrokenPipeError:
        # The reader is gone; a run does not notice.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        kind = "disk" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "rights"
        said = "the server's disk is full" if kind == "disk" else "the server's disk refused a file"
        body = {"kind": kind, "what": said, "why": str(error), "hint": "labctl ssh -- df -h"}
        finish({"error": body})
        return 1
    return 0
