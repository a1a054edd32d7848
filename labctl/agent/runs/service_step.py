"""The step of a service on the machine of a job: choose its port, start it, report the port.

What it prints, first of all its reply, goes to the service's log on the login node.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

from ...wire.services import ServiceStepReply, ServiceStepRequest
from ..reply import send_reply
from .healthcheck import is_http_ready, is_listening
from .service_ports import find_free_port, is_free, is_own_listener

POLL_S = 0.1


def serve(request: ServiceStepRequest) -> None:
    """Run a service until it ends; reply once its port answers."""
    if (
        request.test
        and subprocess.run(
            ["sh", "-c", request.test], stdin=subprocess.DEVNULL, capture_output=True
        ).returncode
    ):
        send_reply(ServiceStepReply(is_missing=True))
        return
    port, words = request.port, list(request.command)
    if request.test:  # labctl's own services take their port as the last argument
        port = port if is_free(port) else find_free_port()
        words.append(str(port))
    elif not is_free(port):
        send_reply(ServiceStepReply(is_port_taken=True))
        return
    variables = {**os.environ, "LABCTL_SERVICE_PORT": str(port)}
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, env=variables)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    threading.Thread(target=_report_port, args=(process, port, request), daemon=True).start()
    with suppress(KeyboardInterrupt):
        sys.exit(process.wait())


def _report_port(process: subprocess.Popen[bytes], port: int, request: ServiceStepRequest) -> None:
    answers = is_http_ready if request.test else is_listening
    while process.poll() is None:
        # Another account that took the port first would receive the token of Jupyter.
        if is_own_listener(port) and answers(port):
            send_reply(ServiceStepReply(port=port))
            return
        time.sleep(POLL_S)
