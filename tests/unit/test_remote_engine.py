"""Asking the Docker Engine on its socket: versions, restarts, refusals, and where the socket is."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_socket import EngineSocket, engine_socket

from labctl.agent.host import engine
from labctl.agent.host.engine_objects import Container, Image, NewContainer
from labctl.agent.reply import Failure


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[EngineSocket]:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DOCKER_CONFIG", raising=False)
    monkeypatch.delenv("DOCKER_CONTEXT", raising=False)
    with engine_socket() as made:
        monkeypatch.setenv("DOCKER_HOST", made.host)
        yield made


@pytest.mark.parametrize(
    ("theirs", "spoken"), [("1.41", "1.41"), ("1.9", "1.9"), ("1.52", "1.44"), ("", "1.44")]
)
def test_the_older_of_both_interfaces_is_spoken(
    served: EngineSocket, theirs: str, spoken: str
) -> None:
    served.version = theirs
    assert engine.inspect_image("python:3.11") is None
    assert served.asked == [("GET", f"/v{spoken}/images/python:3.11/json", None)]


def test_what_exists_is_returned_under_its_name(served: EngineSocket) -> None:
    served.answers = lambda method, path, body: (
        (200, {"Name": "/b", "Id": "7"}) if path.endswith("/containers/b/json") else None
    )
    assert engine.inspect_containers(["a", "b", "c"]) == {"b": Container("7", "/b")}
    assert engine.inspect_containers([]) == {}


@pytest.mark.parametrize("reference", ["a b", "a?all=1", "../containers/x", "a#b", "é"])
def test_an_odd_reference_names_an_image_that_is_not_there(
    served: EngineSocket, reference: str
) -> None:
    assert engine.inspect_image(reference) is None
    ((_, path, _),) = served.asked
    assert path.startswith("/v1.41/images/")
    assert not {" ", "?", "#"} & {*path}


def test_a_name_in_use_is_told_from_other_refusals(served: EngineSocket) -> None:
    said = 'Conflict. The container name "/x" is already in use by container "7".'
    served.answers = lambda method, path, body: (409, {"message": said})
    assert engine.create_container("x", NewContainer(Image="i")) is False
    served.answers = lambda method, path, body: (409, {"message": "unknown log opt"})
    with pytest.raises(engine.EngineRequestError, match="refused") as caught:
        engine.create_container("x", NewContainer(Image="i"))
    assert caught.value.report.why == "unknown log opt"


@pytest.mark.parametrize(("status", "content"), [(500, b"<html>"), (500, b""), (301, {"x": 1})])
def test_a_refusal_without_a_message_is_a_refusal(
    served: EngineSocket, status: int, content: object
) -> None:
    served.answers = lambda method, path, body: (status, content)
    with pytest.raises(engine.EngineRequestError) as caught:
        engine.start_container("x")
    assert caught.value.message


def test_one_that_runs_already_counts_as_started(served: EngineSocket) -> None:
    served.answers = lambda method, path, body: (304, b"")
    engine.start_container("x")
    assert served.asked == [("POST", "/v1.41/containers/x/start", None)]


def test_an_engine_that_ends_while_asked_is_asked_again(
    served: EngineSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "PAUSE_S", 0.01)
    replies = iter([(0, None), (0, None), (200, {"Id": "7"})])
    served.answers = lambda method, path, body: next(replies)
    assert engine.inspect_image("x") == Image("7")


def test_half_an_answer_is_none(served: EngineSocket) -> None:
    half = b"HTTP/1.0 200 OK\r\nContent-Length: 50\r\n\r\n{"
    with socket.socket(socket.AF_UNIX) as server:
        where = str(served.path.with_name("half"))
        server.bind(where)
        server.listen()

        def hang_up() -> None:
            link, _ = server.accept()
            with link:
                link.recv(65536)
                link.sendall(half)

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(engine.EngineRequestError, match="refused") as caught:
            engine._exchange(where, "GET", "/x", None)
        thread.join()
    assert caught.value.status == 0


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.0 200 OK\r\n", None])
def test_an_engine_that_hangs_is_given_up(answer: bytes | None, tmp_path: Path) -> None:
    """Whether it says nothing, a part, or a little at a time for ever."""
    place = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        listener.listen()
        given_up = threading.Event()

        def serve() -> None:
            link, _ = listener.accept()
            with link:
                link.sendall(answer or b"")
                while not given_up.wait(0.01):
                    if answer is None:
                        link.sendall(b"x")

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with pytest.raises(engine.EngineRequestError) as refused:
                engine._exchange(str(place), "GET", "/x", None, 0.3)
        finally:
            given_up.set()
            thread.join()
    assert "within 0.3 s" in refused.value.message


def test_a_start_whose_answer_never_came_is_not_asked_again(served: EngineSocket) -> None:
    served.answers = lambda method, path, body: (0, None)
    with pytest.raises(engine.EngineRequestError) as caught:
        engine.start_container("x")
    assert caught.value.status == 0
    assert len(served.asked) == 1


def test_a_restarting_engine_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, served: EngineSocket, tmp_path: Path
) -> None:
    """Its socket is there and refuses; a moment later somebody listens."""
    monkeypatch.setattr(engine, "PAUSE_S", 0.01)
    path = served.path.with_name("late")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    refused = threading.Event()
    (tmp_path / "bin").mkdir()
    with socket.socket(socket.AF_UNIX) as late:
        late.bind(str(path))
        monkeypatch.setattr(engine, "run_docker", lambda *words: refused.set())

        def listen() -> None:
            assert refused.wait(120)
            late.listen()
            for _ in range(2):  # the version, then the question
                link, _ = late.accept()
                with link:
                    link.recv(65536)
                    link.sendall(b"HTTP/1.0 404 Not Found\r\nContent-Length: 2\r\n\r\n{}")

        thread = threading.Thread(target=listen)
        thread.start()
        assert engine.inspect_image("x") is None
        thread.join()


def test_an_engine_that_does_not_come_back_is_told(
    monkeypatch: pytest.MonkeyPatch, served: EngineSocket
) -> None:
    monkeypatch.setattr(engine, "ATTEMPTS_S", 0.0)
    monkeypatch.setattr(engine, "run_docker", lambda *words: None)
    monkeypatch.setenv("DOCKER_HOST", f"{served.host}-gone")
    with pytest.raises(Failure, match="does not answer") as caught:
        engine.inspect_image("x")
    assert caught.value.report.kind == "engine"


def test_a_server_without_docker_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, served: EngineSocket, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", f"{served.host}-gone")
    with pytest.raises(Failure, match="not installed"):
        engine.inspect_image("x")


def test_the_socket_is_where_the_docker_command_would_go(
    monkeypatch: pytest.MonkeyPatch, served: EngineSocket, tmp_path: Path
) -> None:
    (tmp_path / ".docker").mkdir()
    settings = tmp_path / ".docker" / "config.json"
    assert engine._socket_path() == str(served.path)
    monkeypatch.setenv("DOCKER_HOST", "tcp://far:2375")
    with pytest.raises(Failure, match="tcp://far:2375"):
        engine._socket_path()
    monkeypatch.delenv("DOCKER_HOST")
    for text in ("", "not json", "[]", "{}", '{"currentContext": "default"}'):
        settings.write_text(text)
        assert engine._socket_path() == "/var/run/docker.sock"
    (tmp_path / "docker").write_text('#!/bin/sh\necho "unix:///run/user/7/$1-$2.sock"\n')
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    settings.write_text('{"currentContext": "rootless"}')
    assert engine._socket_path() == "/run/user/7/context-inspect.sock"


def test_the_proxies_of_the_docker_command_are_handed_on(
    served: EngineSocket, tmp_path: Path
) -> None:
    assert engine.build_proxy_env() == {}
    (tmp_path / ".docker").mkdir()
    known = {"default": {"httpProxy": "http://p:1", "noProxy": "*.lan"}, "tcp://far": {}}
    (tmp_path / ".docker" / "config.json").write_text(json.dumps({"proxies": known}))
    one, two = {"http_proxy": "http://p:1", "no_proxy": "*.lan"}, {"NO_PROXY": "*.lan"}
    assert engine.build_proxy_env() == {**one, **two, "HTTP_PROXY": "http://p:1"}
    known[served.host] = {"httpsProxy": "http://own:1"}
    (tmp_path / ".docker" / "config.json").write_text(json.dumps({"proxies": known}))
    assert engine.build_proxy_env() == {
        "https_proxy": "http://own:1",
        "HTTPS_PROXY": "http://own:1",
    }


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"Image": "sha256:2c01", "Healthcheck": {"Test": ["NONE"]}, "Labels": {}}, True),
        ({"Image": "sha256:2c01", "Labels": None}, False),
        ({"Image": "sha256:2c01", "Healthcheck": {"Interval": 5}}, False),
        ({"Image": "postgres:16", "Healthcheck": {"Test": ["NONE"]}}, False),
        (
            {
                "Image": "sha256:2c01",
                "Healthcheck": {"Test": ["NONE"]},
                "Labels": {"labctl.lab-id": "0f1e"},
            },
            False,
        ),
    ],
)
def test_a_step_of_an_image_build_is_told_from_a_program(
    config: dict[str, object], expected: bool
) -> None:
    body = {"Id": "0f1e", "Name": "/recursing_tharp", "Config": config}
    assert engine.convert_object(Container, body).is_build_step is expected
