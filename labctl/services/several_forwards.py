"""Several forwards of a lab at once, each reported as soon as it is ready."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Literal

import msgspec

from labctl.errors import LabError
from labctl.events import Note
from labctl.model import Forward, Server, Service, Value
from labctl.parallel import run_parts
from labctl.servers.context import LabContext
from labctl.services import lab_services
from labctl.services.background_forwards import list_forwards
from labctl.services.port_forward import Forwarding, build_url
from labctl.services.services import WITH_TOKEN, list_services, usual_port
from labctl.state.uses import find_forward_port, hold_forward
from labctl.wire.services import ServiceRequest


class ReadyForward(Value, frozen=True):
    """A URL that answers. `holder` is who keeps it open: this process, or one of before."""

    service: str
    url: str
    holder: Literal["here", "background", "terminal"] = "here"


OnReady = Callable[[ReadyForward], None]


def detach_forwards(
    context: LabContext, names: Sequence[str], port: int, on_ready: OnReady
) -> None:
    """Start services side by side and a background forward to each, or find the one it has."""
    server = context.get_server()
    lock = threading.Lock()

    def open_one(request: ServiceRequest) -> None:
        service = lab_services.ensure(context, server, request)
        forward = lab_services.detach_forward(context, server, service, request, port)
        usual = port or usual_port(service.name, service)
        if forward.local_port != usual:
            at = build_url(service, forward.local_port, token=False)
            text = f"local port {usual} was in use; {service.name} is at {at}"
            context.reporter.emit(Note(text=text))
        with lock:
            on_ready(ReadyForward(forward.service, forward.url))

    _run_each(context, server, names, open_one)


@contextmanager
def open_forwards(
    context: LabContext, names: Sequence[str], port: int, on_ready: OnReady
) -> Iterator[list[Forwarding]]:
    """Start services side by side, and open a forward to each until the block ends.

    A forward that the background or another terminal has open is reported and not opened again,
    unless it has another port than `port`. The value is what this process has opened.
    """
    server = context.get_server()
    opened: list[Forwarding] = []
    lock = threading.Lock()
    with ExitStack() as holds:

        def open_one(request: ServiceRequest) -> None:
            service = lab_services.ensure(context, server, request)
            if (ready := _find_open(context, server, service, port)) is None:
                restart = partial(lab_services.ensure, context, wanted=request)
                forward = lab_services.open_forward(context, server, service, port, restart)
                ready = ReadyForward(service.name, forward.url)
                with lock:
                    opened.append(forward)
                    hold = hold_forward(
                        context.state, context.lab_id, service.name, forward.local_port
                    )
                    holds.enter_context(hold)
            with lock:
                on_ready(ready)

        try:
            _run_each(context, server, names, open_one)
            yield opened
        finally:
            _close(opened)


def add_tokens(context: LabContext, forwards: Sequence[Forward]) -> list[Forward]:
    """Return the forwards with the tokens of their services in their URLs.

    The records contain no token, so the servers of such services are asked. A note says if one does
    not answer; its URLs remain without a token.
    """
    ids = {forward.server_id for forward in forwards if forward.service == WITH_TOKEN}
    servers = {one.id: one for one in context.state.list_servers() if one.id in ids}
    if not servers:
        return list(forwards)
    tokens = run_parts({key: partial(_read_token, context, servers[key]) for key in servers})
    return [
        msgspec.structs.replace(forward, url=f"{forward.url}?token={token}")
        if forward.service == WITH_TOKEN and (token := tokens.get(forward.server_id))
        else forward
        for forward in forwards
    ]


def _read_token(context: LabContext, server: Server) -> str:
    try:
        listed = list_services(context.open_agent(server), server.lab, server.lab_id)
    except LabError as error:
        text = f"the URL of {WITH_TOKEN} lacks its token: {error.what}"
        context.reporter.emit(Note(text=text, level="warning"))
        return ""
    return next((service.token for service in listed if service.name == WITH_TOKEN), "")


def _run_each(
    context: LabContext,
    server: Server,
    names: Sequence[str],
    open_one: Callable[[ServiceRequest], None],
) -> None:
    """Call `open_one` for all services side by side. An unknown name fails before all of them."""
    requests = {name: lab_services.build_request(context, server, name) for name in names}
    run_parts({name: partial(open_one, request) for name, request in requests.items()})


def _find_open(
    context: LabContext, server: Server, service: Service, port: int
) -> ReadyForward | None:
    """Find a forward to the service that another process of this machine has open."""
    for running in list_forwards(context.state, server.id):
        if running.service == service.name and port in (0, running.local_port):
            url = build_url(service, running.local_port)
            return ReadyForward(service.name, url, "background")
    held = find_forward_port(context.state, context.lab_id, service.name)
    if held and port in (0, held):
        return ReadyForward(service.name, build_url(service, held), "terminal")
    return None


def _close(forwards: Sequence[Forwarding]) -> None:
    """Close the forwards at once, so that none of them reports a lost connection."""
    threads = [threading.Thread(target=forward.close) for forward in forwards]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
