"""The container that serves a model: what it sees, what it may not do, and what is refused."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from engine_socket import engine_socket

from labctl.agent.host.engine_objects import ContainerImageConfig, Image, Mount, PortBinding
from labctl.agent.host.paths import lab_dir
from labctl.agent.reply import Failure
from labctl.agent.runs import records, serve, services
from labctl.services.services import serving_files
from labctl.wire.codec import decode, encode
from labctl.wire.runs import RunSpec
from labctl.wire.services import ServedModel, ServiceRequest

LAB_ID = "0f1e2d3c4b5a"
IMAGE = Image("sha256:" + "ab" * 32, Config=ContainerImageConfig(WorkingDir="/srv"))
NIGHT = ServedModel("night")


def request(**more: Any) -> ServiceRequest:
    wish = ServiceRequest(
        lab="digits", lab_id=LAB_ID, name="serve", image="digits:1", env={"SEED": "1"},
        app=serving_files(), memory_bytes=2**30, cpus=1.5, shm_bytes=2**20, model=NIGHT,
    )  # fmt: skip
    return wish._replace(**more)


def build_mounts(root: Path, model: ServedModel) -> list[Mount]:
    return serve.build_mounts(root, model, serving_files())


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A lab with one run on a server."""
    monkeypatch.setenv("HOME", str(tmp_path))
    passwd = tmp_path / "labctl" / ".passwd" / ("passwd-" + "ab" * 12)
    passwd.parent.mkdir(parents=True)
    passwd.touch()
    root = lab_dir("digits", LAB_ID)
    run = root / "runs" / "night"
    for folder in (run / "code", run / "checkpoints" / "step-00000001", root / "code"):
        folder.mkdir(parents=True)
    (run / "code" / "predict.py").touch()
    with engine_socket() as engine:
        monkeypatch.setenv("DOCKER_HOST", engine.host)
        yield root


def seen(mounts: Iterable[Mount]) -> dict[str, tuple[str, bool]]:
    """Where in the container: what is there, and whether it is read-only."""
    return {mount.Target: (mount.Source, mount.ReadOnly) for mount in mounts}


def test_the_container_reads_its_model_and_may_do_nothing_else(root: Path) -> None:
    body = services._build_container(root, IMAGE, request())
    host, mounts = body.HostConfig, seen(body.HostConfig.Mounts)
    run = root / "runs" / "night"
    assert mounts["/lab/code"] == (str(run / "code"), True)
    assert mounts["/lab/run/checkpoints"] == (str(run / "checkpoints"), True)
    assert [target for target, (_, reads) in mounts.items() if not reads] == ["/lab/cache"]
    app, reads_only = mounts["/lab/app"]
    assert reads_only
    package = Path(app, "labctl_model_server")
    files = {str(one.relative_to(package)) for one in package.rglob("*") if one.is_file()}
    assert files == set(serving_files())
    assert host.ReadonlyRootfs is True
    assert host.CapDrop == ("ALL",)
    assert host.SecurityOpt == ("no-new-privileges",)
    assert host.PortBindings == {"8000/tcp": (PortBinding(HostIp="127.0.0.1"),)}
    assert (host.Memory, host.NanoCpus, host.ShmSize) == (2**30, 1_500_000_000, 2**20)
    assert body.User == f"{os.getuid()}:{os.getgid()}"
    assert {"SEED=1", "LABCTL_RUN_ID=night", "LABCTL_SERVE_PORT=8000"} <= set(body.Env)
    assert "LABCTL_SERVE_CHECKPOINTS=/lab/run/checkpoints" in body.Env


def test_a_checkpoint_and_the_code_can_be_chosen(root: Path) -> None:
    chosen = NIGHT._replace(checkpoint="step-00000001", code="lab")
    with pytest.raises(Failure, match=r"the lab's code has no predict\.py"):
        build_mounts(root, chosen)
    (root / "code" / "predict.py").touch()
    body = services._build_container(root, IMAGE, request(model=chosen))
    assert seen(body.HostConfig.Mounts)["/lab/code"] == (str(root / "code"), True)
    assert "LABCTL_SERVE_CHECKPOINTS=/lab/run/checkpoints/step-00000001" in body.Env


@pytest.mark.parametrize(
    ("output", "why"), [("no model here\n", "no model here"), ("", "it printed nothing")]
)
def test_an_image_that_ends_at_once_has_a_next_step(
    monkeypatch: pytest.MonkeyPatch, output: str, why: str
) -> None:
    logs = CompletedProcess((), 0, output, "")
    monkeypatch.setattr(services, "run_docker", lambda *words, check: logs)
    monkeypatch.setattr(services.engine, "remove_container", lambda name: None)
    wanted = ServiceRequest("digits", LAB_ID, "serve-9000", "small:1", as_is=True)
    report = services._describe_early_end("c", None, wanted).report
    assert report.what == "the service serve-9000 exited right after its start"
    assert report.why == why
    assert str(report.hint).startswith("labctl serve --help ")


def test_predict_py_is_missed_before_the_image(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "inspect_container", lambda name: None)
    monkeypatch.setattr(services, "inspect_image", lambda name: pytest.fail("too late"))
    with pytest.raises(Failure, match=r"the lab's code has no predict\.py") as missing:
        services.start(request(model=NIGHT._replace(code="lab")))
    hint = "labctl serve --push   # once predict.py is beside lab.yaml"
    assert missing.value.report.hint == hint


def test_what_was_pulled_is_served_from_its_own_place(root: Path) -> None:
    (root / "code" / "predict.py").touch()
    pulled = ServedModel("old", where="here", code="lab")
    with pytest.raises(Failure, match="has no checkpoints on this server"):
        build_mounts(root, pulled)
    (root / "models" / "old").mkdir(parents=True)
    with pytest.raises(Failure, match="has no checkpoints on this server"):
        build_mounts(root, pulled)
    (root / "models" / "old" / "step-1").mkdir()
    sources = seen(build_mounts(root, pulled))
    assert sources["/lab/run/checkpoints"] == (str(root / "models" / "old"), True)


@pytest.mark.parametrize(
    ("model", "kind", "said"),
    [
        ({"run": "bare"}, "missing", "the code of run bare has no predict.py"),
        ({"checkpoint": "step-2"}, "missing", "no checkpoint 'step-2'"),
        ({"checkpoint": "../../code"}, "usage", "leaves its directory"),
        ({"checkpoint": "/etc"}, "usage", "leaves its directory"),
        ({"run": "../x"}, "usage", "bad name"),
    ],
)
def test_what_is_not_there_or_leads_out_is_refused(
    root: Path, model: dict[str, str], kind: str, said: str
) -> None:
    (root / "runs" / "bare" / "checkpoints" / "step-1").mkdir(parents=True)
    with pytest.raises(Failure, match=said) as refused:
        build_mounts(root, NIGHT._replace(**model))
    assert refused.value.report.kind == kind
    if model == {"checkpoint": "step-2"}:
        assert refused.value.report.why == "available checkpoints: step-00000001"


def test_the_latest_run_with_checkpoints_is_named(root: Path) -> None:
    """Not a run of labctl itself, although it is later."""
    shell = NIGHT._replace(run="shell")
    for number, name in enumerate(("night", "late", "probe-1", "shell")):
        directory = root / "runs" / name
        (directory / ".labctl").mkdir(parents=True)
        if name != "shell":
            (directory / "checkpoints" / "step-1").mkdir(parents=True)
        spec = RunSpec(name, "digits", LAB_ID, ("python",), "digits:1", {})
        records.write_spec_and_claim(directory, spec, float(number))
    with pytest.raises(Failure, match="run shell has no checkpoints") as refused:
        serve.require_model(root, shell)
    assert refused.value.report.why == "it has not ended, and may save its first one later"
    latest = "labctl serve late   # the latest run with checkpoints"
    assert refused.value.report.hint == f"labctl logs -f shell\n{latest}"
    ended = records.RunRecord("shell", "exited", LAB_ID, exit_code=0)
    records.write_final_record(root / "runs" / "shell", ended)
    with pytest.raises(Failure, match="run shell has no checkpoints") as refused:
        serve.require_model(root, shell)
    assert refused.value.report.hint == latest
    for name in ("night", "late"):
        shutil.rmtree(root / "runs" / name / "checkpoints")
    with pytest.raises(Failure, match="run shell has no checkpoints") as refused:
        serve.require_model(root, shell)
    assert refused.value.report.why.startswith("no run on this server has any: ")
    assert refused.value.report.hint == "save the model there in your code, then:\nlabctl run"


def test_another_model_or_another_version_of_labctl_is_another_wish(root: Path) -> None:
    wishes = {
        services.hash_settings(one)
        for one in (
            request(),
            request(model=NIGHT._replace(run="other")),
            request(model=NIGHT._replace(checkpoint="step-00000001")),
            request(env={}),
            request(app={"app.py": "another"}),
        )
    }
    assert len(wishes) == 5
    assert services.hash_settings(decode(ServiceRequest, encode(request()))) in wishes


@pytest.mark.parametrize(
    ("wish", "label"),
    [
        (request(app={"a.py": "text"}), "659a444ab4b6710b"),
        (
            ServiceRequest("digits", LAB_ID, "tensorboard", "digits:1", gpus="all"),
            "f1334be8efa2f8e1",
        ),
        (
            ServiceRequest("digits", LAB_ID, "jupyter", "digits:1", env={"A": "b"}),
            "66fe5e02397a90c3",
        ),
        (
            ServiceRequest("digits", LAB_ID, "web", "digits:1", ("python", "app.py"), 80),
            "a1f9631158ed58ef",
        ),
    ],
)
def test_the_label_of_a_service_is_that_of_earlier_versions(
    wish: ServiceRequest, label: str
) -> None:
    """Else each of them would be replaced, or reported to have other settings."""
    assert services.hash_settings(wish) == label


def test_any_image_keeps_its_own_command_and_may_not_write_into_the_lab(root: Path) -> None:
    wish = request(name="serve-9000", port=9000, as_is=True, command=("--model", "x"), model=None)
    body = services._build_container(root, IMAGE, wish)
    assert body.Entrypoint is None
    assert body.Cmd == ("--model", "x")
    assert body.WorkingDir == "/srv"
    mounts = seen(body.HostConfig.Mounts)
    assert [target for target, (_, reads) in mounts.items() if not reads] == ["/lab/cache"]
    assert body.HostConfig.ShmSize == 2**20
    assert services._build_container(root, IMAGE, wish._replace(command=())).Cmd is None


def test_how_a_server_that_ended_is_told() -> None:
    refused = serve.explain_failure(3, "Warning: x\nrefused: 'a.pt' is a pickle").report
    assert (refused.kind, refused.why) == ("policy", "'a.pt' is a pickle")
    broken = serve.explain_failure(1, "Traceback ...").report
    assert (broken.kind, broken.why) == ("service", "Traceback ...")
