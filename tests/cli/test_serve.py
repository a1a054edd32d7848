"""`labctl serve` as it is typed: what is refused before the server is asked, and what is wished."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from labctl.cli.serve import ServeOptions, _build_request, _serve
from labctl.errors import LabError, NotFoundError, PolicyError, UsageError
from labctl.lab import Lab
from labctl.model import Endpoint, Offer, Run, Server
from labctl.runs import runs
from labctl.services import model_serving, services, several_forwards


@pytest.fixture
def lab(home: Path) -> Lab:
    """A lab with a server, a run on it, and one that ran on a server that is gone."""
    made = Lab.load(home / "digits", environ={"HOME": str(home)})
    server = Server(
        id="box-1", provider="local", lab="digits", lab_id=made.id, alias="digits",
        endpoint=Endpoint(host="127.0.0.1"), offer=Offer(provider="local", type="box"),
        created_at=time.time(), state="running",
    )  # fmt: skip
    made.context.state.save_server(server)
    for at, (run, box) in enumerate([("old", "box-0"), ("night", "box-1")]):
        kept = Run(
            id=run, lab_id=made.id, server_id=box, state="exited", image=f"{run}:1",
            created_at=float(at),
        )  # fmt: skip
        made.context.state.save_run(kept)
    (home / "digits" / "predict.py").touch()
    folder = made.context.paths.ssh_dir / "box-1"
    folder.mkdir(parents=True)
    return made


def wanted(lab: Lab, *words: str, **given: Any) -> Any:
    return _build_request(lab, lab.context.get_server(), words, ServeOptions(**given))


def test_the_latest_run_is_served_by_its_own_code_in_its_own_image(lab: Lab) -> None:
    wish = wanted(lab, batch=8, env=("A=b=c",), checkpoint="step-00000001")
    assert (wish.name, wish.image, wish.replace) == ("serve", "night:1", True)
    assert (wish.model.run, wish.model.where, wish.model.code) == ("night", "run", "run")
    assert wish.model.checkpoint == "step-00000001"
    assert wish.env == {"A": "b=c", "LABCTL_SERVE_MAX_BATCH": "8"}
    assert "fastapi" in wish.args["PACKAGES"]


def test_an_image_is_served_as_it_is(lab: Lab) -> None:
    wish = wanted(lab, "--model", "x", image="vllm/vllm-openai", port=8000, load_time=900)
    assert (wish.name, wish.image, wish.port) == ("serve-8000", "vllm/vllm-openai", 8000)
    assert (wish.command, wish.as_is, wish.model) == (("--model", "x"), True, None)
    assert wish.deadline_s == 900


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ((), {"port": 80}),
        ((), {"image": "x"}),
        (("night", "old"), {}),
        ((), {"env": ("A",)}),
        ((), {"env": ("A B=c",)}),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_next_command(
    lab: Lab, words: tuple[str, ...], given: dict[str, Any]
) -> None:
    with pytest.raises(UsageError) as refused:
        wanted(lab, *words, **given)
    assert refused.value.hint.startswith("labctl serve")


def test_a_run_that_is_neither_there_nor_here_must_be_pulled(lab: Lab) -> None:
    old = runs.find_run(lab.context, "old")
    lab.context.state.save_run(msgspec.structs.replace(old, has_checkpoints=True))
    with pytest.raises(
        NotFoundError, match="neither on this server nor on this machine"
    ) as missing:
        wanted(lab, "old")
    assert missing.value.hint == "labctl pull old"
    lab.context.state.save_run(old)
    with pytest.raises(NotFoundError, match="run old has no checkpoints") as missing:
        wanted(lab, "old")
    saving = "save the model there in your code, then:\nlabctl run"
    assert missing.value.hint == saving, "there is nothing to pull"
    lab.context.state.save_run(msgspec.structs.replace(old, new_files=("code/out/net.onnx",)))
    with pytest.raises(NotFoundError, match="run old has no checkpoints") as missing:
        wanted(lab, "old")
    assert missing.value.why.endswith("; this run wrote code/out/net.onnx instead")
    assert '"/net.safetensors"   # in the format of safetensors\n' in missing.value.hint
    with pytest.raises(NotFoundError, match="there is no run"):
        wanted(lab, "never")


def test_a_lab_without_predict_py_sends_nothing(lab: Lab) -> None:
    (lab.config.root / "predict.py").unlink()
    for run, push in (("old", False), ("night", True)):
        with pytest.raises(NotFoundError, match=r"the lab's code has no predict\.py") as missing:
            wanted(lab, run, push=push)
        assert "load(checkpoints)" in missing.value.why
        assert missing.value.hint == "labctl serve --push   # once predict.py is beside lab.yaml"


def test_pulled_checkpoints_with_a_pickle_are_never_sent(lab: Lab) -> None:
    home = lab.config.root / "runs" / "old" / "checkpoints"
    home.mkdir(parents=True)
    (home / "model.safetensors").write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(PolicyError, match="checkpoints of run old are refused") as refused:
        wanted(lab, "old")
    assert "'model.safetensors' is a pickle" in refused.value.why


def test_args_need_an_image(labctl: Any, lab: Lab) -> None:
    for words in (("--", "--model", "x y"), ("night", "--", "8000")):
        said = labctl("serve", *words)
        assert said.code == 2
        assert "labctl: ARGS need --image\n" in said.err
    assert "next: labctl serve --image IMAGE --port 8000 -- 8000\n" in said.err


def test_without_a_server_the_next_step_is_up(labctl: Any) -> None:
    said = labctl("serve")
    assert said.code == 4
    assert "next: labctl up" in said.err


class InterruptedForward:
    """An open forward at whose terminal somebody presses Ctrl-C."""

    url, local_port = "http://127.0.0.1:1", 1

    def wait(self) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("is_terminal", [True, False])
def test_ctrl_c_closes_the_forward_and_says_so(
    lab: Lab,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_terminal: bool,
) -> None:
    monkeypatch.setattr(model_serving, "forward", lambda *_: nullcontext(InterruptedForward()))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    options = ServeOptions(image="ollama/ollama", port=11434)
    server = lab.context.get_server()
    _serve(lab, server, wanted(lab, image="ollama/ollama", port=11434), options, json_=False)
    own_line = "\r\x1b[K" if is_terminal else ""  # erases the ^C of the terminal
    assert capsys.readouterr().err.endswith(f"labctl serve --stop\n{own_line}closed\n")


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("serve", "--image", "ollama/ollama", "--port", "11434"), "closed"),
        (("forward", "tensorboard"), "closed"),
        (
            ("forward", "tensorboard", "--detach"),
            "interrupted; to list what is open: labctl forward --list",
        ),
    ],
)
def test_ctrl_c_while_a_service_starts_leaves_one_line(
    lab: Lab,
    labctl: Any,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    text: str,
    is_terminal: bool,
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(model_serving, "forward", interrupt)
    monkeypatch.setattr(several_forwards, "open_forwards", interrupt)
    monkeypatch.setattr(several_forwards, "detach_forwards", interrupt)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    said = labctl(*words)
    assert said.code == 130
    erased = "\r\033[K" if is_terminal else ""
    assert said.err == f"{erased}{text}\n"


def test_only_what_serve_started_is_its_own() -> None:
    names = ["serve", "serve-8000", "server", "jupyter"]
    assert [one for one in names if services.is_served(one)] == ["serve", "serve-8000"]


@contextmanager
def answering(status: int, body: bytes) -> Iterator[int]:
    """The port of somebody who answers every GET the same."""

    class Same(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Same) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


WELL = (
    b'{"status": "ok", "model": {"run": "night", "checkpoint": "step-1", "classes": 2}, "new": 1}'
)


def test_what_is_served_is_asked_of_the_server_itself() -> None:
    with answering(200, WELL) as port:
        assert model_serving.check_health(port) == model_serving.Health(
            run="night", checkpoint="step-1", classes=2
        )
    with pytest.raises(LabError, match="does not answer"):
        model_serving.check_health(port)
    for status, body in ((200, b"hello"), (200, b"{}"), (503, b""), (503, WELL)):
        with answering(status, body) as port, pytest.raises(LabError) as told:
            model_serving.check_health(port)
        assert told.value.hint == model_serving.NEXT
