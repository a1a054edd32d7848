"""Two commands that start the same service of a lab."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from lab_world import LAB_ID, Recorded, World

from labctl.events import Event, Note
from labctl.lifecycle import up
from labctl.model import Service
from labctl.services import lab_services
from labctl.wire.services import ServiceRequest


def test_the_second_one_names_the_first_and_waits_for_it(
    lab: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = up.up(lab.context())
    begun, announced = threading.Event(), threading.Event()
    starts: list[str] = []

    def start(*args: Any, **kwargs: Any) -> Service:
        starts.append(threading.current_thread().name)
        begun.set()
        assert announced.wait(20)
        return Service(name="tensorboard", port=6006)

    def watch(event: Event) -> None:
        if isinstance(event, Note) and "has been starting tensorboard since" in event.text:
            announced.set()

    monkeypatch.setattr("labctl.services.services.ensure_service", start)
    wanted = ServiceRequest(lab="digits", lab_id=LAB_ID, name="tensorboard", image="small:1")
    first = threading.Thread(
        target=lab_services.ensure, args=(lab.context(), server, wanted), name="first"
    )
    first.start()
    assert begun.wait(20)
    context = lab.context(Recorded(on_event=watch))
    assert lab_services.ensure(context, server, wanted).port == 6006
    first.join(20)
    assert announced.is_set()
    assert starts == ["first", threading.current_thread().name]
