"""The entry point: `python3 __main__.py VERB`, one JSON line in, one marked JSON line out."""

from __future__ import annotations

import errno
import gc
import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any, BinaryIO

from ..wire.codec import MessageError, decode
from ..wire.verbs import SHOW_DISK, ErrorReply
from .broker.detection import BROKER, is_brokered
from .host.paths import labctl_home
from .reply import Failure, send_closing_reply, send_reply

# Verb -> module and function. Imports take time, so only the verb's own module is imported.
VERBS = {
    "start": "runs.runs.start",
    "start-held": "runs.runs.start_held",
    "address": "host.addresses.find_address",
    "check-peers": "host.peers.check_peers",
    "wireguard": "host.wireguard.inspect",
    "wireguard-connect": "host.wireguard.connect",
    "wireguard-remove": "host.wireguard.remove",
    "status": "runs.run_state.status",
    "cancel": "runs.runs.cancel",
    "stall": "runs.stall.measure",
    "resume": "runs.resume.resume",
    "restore-pushed": "runs.resume.from_push",
    "clear": "runs.ended_runs.clear",
    "session": "runs.tmux_session.open_session",
    "evaluate": "sandbox.evaluation.evaluate",
    "check": "sandbox.public_tests.check",
    "grade": "sandbox.grading.grade",
    "grade-check": "sandbox.grading.check",
    "grade-clear": "sandbox.grading.clear",
    "check-data": "host.server_data.check_data",
    "plan": "files.files.plan",
    "commit": "files.commit.commit",
    "edits": "files.edits.edits",
    "code-files": "files.edits.list_code_files",
    "home-files": "files.home_files.list_home_files",
    "hashes": "files.content_hashes.hashes",
    "manifest": "files.outputs.manifest",
    "image": "runs.images.find",
    "service": "runs.service_executors.start",
    "services": "runs.service_executors.status",
    "service-stop": "runs.service_executors.stop",
    "pulled": "watchdog.saved_results.record_pulled",
    "restore": "files.disk_import.restore",
    "guard": "watchdog.install.guard",
    "watch": "watchdog.state_files.watch",
    "reload-units": "host.systemd_reload.reload_units",
    "extend": "watchdog.install.extend",
    "reclaim-notice": "watchdog.reclaim.notice",
    "reclaimed": "watchdog.reclaim_record.read_reclaim",
    "keep-disk": "watchdog.disk.keep_disk",
    "store": "mirror.store.prepare",
    "store-boto3": "mirror.boto3_python.install_boto3",
    "store-probe": "mirror.store.probe",
    "mirror-now": "mirror.mirror.mirror_now",
    "store-image": "mirror.images.start_send",
    "send-image": "mirror.image_upload.send",
    "start-load-image": "mirror.images.start_load",
    "load-image": "mirror.image_download.load",
    "restore-run": "mirror.restore.restore",
}
STREAMING_VERBS = {
    "follow": "runs.follow.follow",
    "run": "runs.follow.start_and_follow",
    "build": "runs.images.build",
    "build-environment": "runs.environment_builds.build",
    "pull-image": "runs.images.pull",
    "service-image": "runs.services.build",
    "fetch": "files.fetch.fetch_data_sets",
    "watchdog": "watchdog.watchdog.run",
    "await-reclaim": "watchdog.notice_services.await_reclaim",
    "telemetry": "host.telemetry.record",
    "top": "host.top.top",
    "service-step": "runs.service_step.serve",
    "mirror-serve": "mirror.mirror.serve",
    "broker": "broker.broker.run",
}
# Verbs that do not show that a server is in use; all others do.
PASSIVE_VERBS = (
    "status",
    "stall",
    "manifest",
    "edits",
    "image",
    "services",
    "watch",
    "pulled",
    "follow",
    "watchdog",
    "await-reclaim",
    "telemetry",
    "reload-units",
    "top",
    "service-step",
    "keep-disk",
    "reclaim-notice",
    "reclaimed",
    "store-probe",
    "mirror-now",
    "mirror-serve",
    "send-image",
    "broker",
)


def _call_verb(name: str, requests: BinaryIO) -> Any:
    """Call a verb's handler with its request, whose type is the annotation of `request`.

    The request is read after the imports: the client builds it meanwhile.
    """
    module_name, _, function = name.rpartition(".")
    module = import_module(f".{module_name}", __package__)
    handler = getattr(module, function)
    kind = getattr(module, handler.__annotations__["request"])
    try:
        request = decode(kind, requests.readline() or b"{}")
    except MessageError as error:
        what = "the labctl agent on the server cannot read this request"
        raise Failure("usage", what, str(error), "labctl doctor") from None
    return handler(request)


def _mark_used() -> None:
    """Touch the file that the watchdog's activity.py reads; ignore errors."""
    with suppress(OSError):
        (labctl_home() / ".used").touch()


def main() -> int:
    verb = sys.argv[1] if len(sys.argv) > 1 else ""
    if is_brokered():
        # Also for the docker command and the terminals that this process starts.
        os.environ["DOCKER_HOST"] = f"unix://{BROKER}"
    if verb not in PASSIVE_VERBS:
        _mark_used()
    requests = sys.stdin.buffer
    try:
        if verb in STREAMING_VERBS:
            _call_verb(STREAMING_VERBS[verb], requests)
        elif verb in VERBS:
            # One call makes little garbage; looking for it is a tenth of the time of a large plan.
            gc.disable()
            send_reply(_call_verb(VERBS[verb], requests))
        else:
            raise Failure("usage", f"the labctl agent on the server has no verb {verb!r}")
    except Failure as failure:
        send_closing_reply(ErrorReply(failure.report))
        return 1
    except BrokenPipeError:
        # The reader is gone; this does not affect a run.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        kind = "disk" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "rights"
        what = (
            "the server's disk is full" if kind == "disk" else "the server could not write a file"
        )
        refusal = Failure(kind, what, str(error), SHOW_DISK)
        send_closing_reply(ErrorReply(refusal.report))
        return 1
    return 0
