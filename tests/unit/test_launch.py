"""Which command starts a run with `launch:`."""

from __future__ import annotations

from pathlib import Path

import pytest

from labctl.config import load_lab
from labctl.errors import ConfigError, UsageError
from labctl.runs.launch import build_launch_command

TRAIN = ("python", "train.py", "--epochs", "5")


def launch(
    tmp_path: Path, settings: str, command: tuple[str, ...] = TRAIN, gpus: int = 2
) -> tuple[str, ...]:
    (tmp_path / "lab.yaml").write_text(f"lab: digits\n{settings}\n")
    config = load_lab(tmp_path, environ={"HOME": str(tmp_path)})
    return build_launch_command(config, command, gpus)


def test_each_gpu_gets_a_process_and_all_but_the_first_a_log_of_their_own(tmp_path: Path) -> None:
    assert launch(tmp_path, "launch: {with: torchrun, restarts: 3}", gpus=3) == (
        *("python", "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node=3", "--max-restarts=3"),
        *("--log-dir=/lab/run/logs/ranks", "--redirects=1:3,2:3"),
        *("train.py", "--epochs", "5"),
    )


@pytest.mark.parametrize("gpus", [0, 1])
def test_one_process_needs_no_torchrun(tmp_path: Path, gpus: int) -> None:
    assert launch(tmp_path, "launch: {with: torchrun}", gpus=gpus) == TRAIN
    assert launch(tmp_path, "", gpus=4) == TRAIN


def test_a_number_of_processes_needs_no_gpu(tmp_path: Path) -> None:
    command = launch(tmp_path, "launch: {with: torchrun, per_server: 2}", gpus=0)
    assert "--nproc-per-node=2" in command


def test_without_docker_the_logs_are_beside_the_code(tmp_path: Path) -> None:
    settings = "launch: {with: torchrun}\nserver: {provider: static, executor: process}"
    assert "--log-dir=../logs/ranks" in launch(tmp_path, settings)


def test_a_module_is_started_as_one(tmp_path: Path) -> None:
    command = launch(tmp_path, "launch: {with: torchrun}", ("/venv/bin/python3", "-m", "a.b", "-x"))
    assert command[:3] == ("/venv/bin/python3", "-m", "torch.distributed.run")
    assert command[-3:] == ("--module", "a.b", "-x")


@pytest.mark.parametrize("run", ["sh -c 'python train.py'", "python", "python -c 1", "./train"])
def test_a_program_of_the_lab_that_torchrun_cannot_start_is_refused(
    tmp_path: Path, run: str
) -> None:
    with pytest.raises(UsageError, match="torchrun cannot start") as raised:
        launch(tmp_path, f"launch: {{with: torchrun}}\nrun: {run}", ())
    assert "python -m MODULE" in raised.value.why


@pytest.mark.parametrize(
    "command", [("nvidia-smi",), ("torchrun", "train.py"), ("python", "-c", "1")]
)
def test_a_typed_command_that_is_no_program_of_the_lab_runs_once(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    assert launch(tmp_path, "launch: {with: torchrun}", command) == command


def test_the_command_of_an_earlier_run_is_not_launched_twice(tmp_path: Path) -> None:
    launched = launch(tmp_path, "launch: {with: torchrun}")
    assert launched != TRAIN
    assert launch(tmp_path, "launch: {with: torchrun}", launched) == launched


@pytest.mark.parametrize(("text", "stall_s"), [("10m", 600), ("off", 0)])
def test_a_stall_is_a_duration_or_off(tmp_path: Path, text: str, stall_s: int) -> None:
    (tmp_path / "lab.yaml").write_text(
        f"lab: digits\nserver: {{count: 2}}\nlaunch: {{stall: {text}}}\n"
    )
    assert load_lab(tmp_path, environ={}).launch.stall_s == stall_s


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("launch: {with: mpirun}", "torchrun"),
        ("launch: {with: torchrun, per_server: many}", "not a number of processes"),
        ("launch: {with: torchrun, per_server: 0}", "not a number of processes"),
        ("launch: {with: torchrun, restarts: -1}", "not a number of restarts"),
        ("launch: {restarts: 2}", "needs `with: torchrun`, or several servers"),
        ("server: {network: wireguard}", "needs several servers: write `count: 2`"),
        ("server: {network: auto}", "needs several servers: write `count: 2`"),
        ("server: {count: 1, network: private}", "needs several servers: write `count: 2`"),
        ("launch: {stall: 10m}", "needs several servers: write `count: 2`"),
        ("server: {count: 2}\nlaunch: {stall: 5s}", "the minimum is 30s"),
        ("server: {count: 2, network: vpn}", "is not one of auto, private, wireguard"),
        ("launch: torchrun", "expected a mapping"),
    ],
)
def test_wrong_settings_are_refused_before_a_server_costs_money(
    tmp_path: Path, settings: str, message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        launch(tmp_path, settings)
    assert message in raised.value.problems[0].message
