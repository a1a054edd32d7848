"""Why a run is wrong: each rule over its curves, its record and its log; no input fails."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from explain_cases import COMMAND, findings, material, run, samples, series, unknown
from hypothesis import given, settings
from hypothesis import strategies as st

from labctl.insight.explain.diagnosis import diagnose
from labctl.insight.explain.evidence import LeftOutPath
from labctl.insight.scalars import Scalars, Series
from labctl.insight.telemetry import GpuSample, Sample
from labctl.model import Run

FALLS = [2.3 * math.exp(-n / 10) + 0.05 for n in range(100)]
NAN = math.nan


def wobble(values: list[float], size: float = 0.02) -> list[float]:
    """Scatter that is the same at every run."""
    return [value * (1 + size * ((n * 7919) % 13 - 6) / 6) for n, value in enumerate(values)]


def losses(values: list[float], **fields: Any) -> dict[str, Any]:
    return findings(material(series("train/loss", values), **fields))


def test_a_loss_that_falls() -> None:
    found = losses(wobble(FALLS))
    assert set(found) == {"loss-falls"}
    assert found["loss-falls"].level == "good"


def test_a_loss_that_becomes_nan() -> None:
    curves = (
        series("train/loss", [*FALLS[:20], NAN, NAN]),
        series("train/learning_rate", [0.01] * 22),
        series("train/gradient_norm", [1.0] * 19 + [4000.0, NAN, NAN]),
    )
    found = findings(material(*curves))["loss-nan"]
    said = " ".join(line.text for line in found.evidence)
    assert "at step 200, NaN at step 210" in said
    assert "gradient_norm: 4000 at that step" in said
    assert found.next.startswith("labctl run -- python train.py --lr 0.001 ")
    assert "fp16" not in found.why
    half = findings(material(*curves, log="cuda, torch.float16, batches"))["loss-nan"]
    assert "65504" in half.why


def test_infinity_is_no_number_either() -> None:
    assert "infinite" in losses([1.0] * 5 + [math.inf])["loss-nan"].what


def test_nan_from_the_start_is_another_matter() -> None:
    found = losses([NAN] * 30)
    assert set(found) == {"loss-nan-from-the-start"}
    assert "detect_anomaly" in found["loss-nan-from-the-start"].next


def test_a_script_that_stops_at_nan_says_so_in_its_log_alone() -> None:
    said = "train: the loss became nan; try a smaller --lr"
    found = losses(FALLS[:30], log=f"x\n{said}\n", run=run(exit_code=1, summary="failed"))
    assert found["loss-nan"].evidence[0].text == said
    assert "--lr 0.001" in found["loss-nan"].next


def test_nan_everywhere_is_told_and_nothing_else_is_claimed() -> None:
    nan = GpuSample(use_percent=None)
    tags = ("train/loss", "val/loss", "train/accuracy", "val/accuracy", "train/learning_rate")
    curves = [series(tag, [NAN] * 50) for tag in (*tags, "train/gradient_norm")]
    curves.append(series("speed/data_wait_share", [NAN] * 50))
    made = material(*curves, samples=samples(nan))
    assert set(findings(made)) == {"loss-nan-from-the-start", "gradients-not-finite"}


def test_a_loss_that_diverges() -> None:
    found = losses(wobble([1.0 + 0.05 * n for n in range(100)]))["loss-diverging"]
    assert "diverges" in found.what
    assert "--lr 0.001" in found.next
    back = losses(wobble([*FALLS[:50], *(FALLS[49] + 0.03 * n for n in range(50))]))
    assert "rises again after step" in back["loss-diverging"].what


def test_a_loss_that_is_flat_at_the_level_of_guessing() -> None:
    found = losses(wobble([math.log(10)] * 60, 0.005))["loss-flat"]
    assert "guesses" in found.what
    assert "ln 10 is 2.303" in found.evidence[1].text
    assert "--lr 0.1" in found.next
    other = losses(wobble([5.0] * 60, 0.005))["loss-flat"]
    assert "guesses" not in other.what


def test_a_loss_that_fell_to_no_more_than_guessing() -> None:
    wild = wobble([max(12.0 - n, 2.33) for n in range(60)], 0.004)
    curves = (series("train/loss", wild), series("val/accuracy", [0.09, 0.11, 0.1]))
    fast = run(command=("python", "train.py", "--lr", "30"))
    found = findings(material(*curves, run=fast))["loss-guesses"]
    assert "guesses among 10" in found.what
    assert "10% right; accuracy 10%" in found.evidence[1].text
    assert found.next == "labctl run -- python train.py --lr 0.1"
    assert "loss-falls" not in findings(material(*curves, run=fast))
    percents = series("val/accuracy", [9.0, 11.0, 10.0])
    assert "loss-guesses" in findings(material(curves[0], percents))


def test_a_loss_that_happens_to_end_at_such_a_number_is_none_of_it() -> None:
    """A language model's may: perplexity 10 among 50,000 words is no guess."""
    values = [10.8 * math.exp(-n / 10) + 2.31 for n in range(100)]
    assert "loss-guesses" not in losses(values)
    better = material(series("train/loss", values), series("val/accuracy", [0.4, 0.5, 0.55]))
    assert "loss-guesses" not in findings(better)


def test_a_loss_that_was_still_falling() -> None:
    found = losses(wobble([2.0 - 0.01 * n for n in range(100)]))["loss-still-falling"]
    assert found.next.endswith("--epochs 20")


def test_a_loss_below_zero_is_a_loss() -> None:
    assert "loss-falls" in losses(wobble([value - 5 for value in FALLS], 0.001))


def test_a_loss_that_jumps() -> None:
    values = wobble(FALLS)
    values[60] = 2.0
    found = losses(values)["loss-spikes"]
    assert found.level == "advice"
    assert "2 at step 610" in found.evidence[0].text
    for number in (30, 40, 50, 70):
        values[number] = 2.5
    assert losses(values)["loss-spikes"].level == "problem"


@pytest.mark.parametrize("points", [0, 1, 19])
def test_too_few_points_tell_nothing(points: int) -> None:
    made = material(series("train/loss", FALLS[:points]))
    count = "1 point" if points == 1 else f"{points} points"
    assert unknown(made)["loss"].why == f"train/loss has {count}; this rule needs 20"
    assert not [rule for rule in findings(made) if rule.startswith("loss")]


def test_without_curves_it_says_how_to_make_them() -> None:
    assert "add_scalar" in unknown(material())["loss"].next
    assert "wrote no TensorBoard" in unknown(material())["loss"].why


def test_settings_alone_are_not_called_no_curves() -> None:
    sizes = series("setup/batch_size", [32.0])
    assert unknown(material(sizes))["loss"].why == "it logged only its settings, as setup/..."
    live = material(sizes, run=run(state="running", ended_at=0.0))
    assert unknown(live)["loss"].why == "it logged only its settings so far, as setup/..."
    other = unknown(material(series("reward", FALLS)))
    assert "there are: reward" in other["loss"].why
    assert {"gradient-norm", "learning-rate", "overfitting", "data-wait"} <= set(other)


@pytest.mark.parametrize(
    "tag", ["loss", "train/loss", "Loss/train", "train/epoch_loss", "trainLoss", "loss/total"]
)
def test_losses_of_many_names_are_known(tag: str) -> None:
    assert "loss-falls" in findings(material(series(tag, FALLS)))


@pytest.mark.parametrize("tag", ["val/loss", "validation/epoch_loss", "evalLoss", "loss/test"])
def test_and_so_are_those_of_held_out_data(tag: str) -> None:
    made = material(series(tag, FALLS[:10]))
    assert "no-overfitting" in findings(made)
    assert "loss-falls" not in findings(made)


def test_the_loss_of_training_is_taken_before_its_parts() -> None:
    parts = (series("train/loss_box/part", [1.0] * 60), series("train/loss", wobble(FALLS)))
    assert "loss-falls" in findings(material(*parts))


def test_gradients_that_jump_vanish_or_are_no_numbers() -> None:
    norms = [1.0 + 0.1 * (n % 3) for n in range(60)]
    assert "gradient-spikes" not in findings(material(series("grad_norm", norms)))
    norms[40] = 90.0
    found = findings(material(series("grad_norm", norms)))["gradient-spikes"]
    assert "90 at step 410" in found.evidence[0].text
    assert "clip_grad_norm_" in found.next
    clipped = material(series("grad_norm", norms), run=run(command=(*COMMAND, "--clip", "1")))
    assert "already clipped" in findings(clipped)["gradient-spikes"].next
    small = [norm / 1000 for norm in norms]
    said = findings(material(series("grad_norm", small)))["gradient-spikes"].next
    assert said.endswith("since no norm is above 1")
    tiny = findings(material(series("grad/norm", [1e-9] * 30)))
    assert tiny["gradients-vanish"].level == "problem"
    lost = series("gradient_norm", [*norms[:30], NAN])
    assert findings(material(lost))["gradients-not-finite"].level == "problem"
    assert findings(material(lost, log="fp16"))["gradients-not-finite"].level == "good"


def test_the_learning_rate() -> None:
    assert "learning-rate-zero" in findings(material(series("lr", [0.0] * 30)))
    ended = material(series("lr", [0.1] * 60 + [0.0] * 40))
    assert "0 after step 600" in findings(ended)["learning-rate-zero"].evidence[0].text
    loss = series("train/loss", wobble([max(1 - n / 30, 0.3) for n in range(100)]))
    constant = findings(material(loss, series("lr-AdamW", [0.01] * 100)))
    assert "--lr 0.0033" in constant["learning-rate-constant"].next
    decays = material(loss, series("lr", [0.01 * (1 - n / 100) for n in range(100)]))
    assert "learning-rate-constant" not in findings(decays)


def test_overfitting_by_the_loss() -> None:
    held = series("val/loss", [2.0, 1.2, 0.9, 0.8, 0.9, 1.1, 1.4, 1.6], every=100)
    made = material(held, series("train/loss", wobble(FALLS)))
    found = findings(made)["overfitting"]
    assert found.level == "problem"
    assert "after step 400" in found.what
    assert "checkpoint of step 400" in found.next
    assert "0.8" in found.evidence[0].text
    late = series("val/loss", [2.0, 1.2, 0.9, 0.8, 0.79, 0.78, 0.775, 0.9], every=100)
    assert "overfitting" not in findings(material(late))


def test_overfitting_by_the_accuracy() -> None:
    trained = series("train/accuracy", [0.5, 0.8, 0.95, 0.99])
    lags = material(trained, series("val/accuracy", [0.5, 0.7, 0.72, 0.72]))
    assert "points lower" in findings(lags)["overfitting-gap"].what
    percents = material(
        series("train/acc", [50.0, 80.0, 95.0, 99.0]), series("val/acc", [50.0, 70.0, 72.0, 72.0])
    )
    assert "overfitting-gap" in findings(percents)
    keeps_up = material(trained, series("val/accuracy", [0.5, 0.8, 0.9, 0.93]))
    assert "overfitting-gap" not in findings(keeps_up)


@pytest.mark.parametrize(
    ("line", "rule", "word"),
    [
        ("ModuleNotFoundError: No module named 'timm'", "module-missing", "module timm"),
        ("CUDA error: no kernel image is available for execution on the device",
         "card-unknown-to-pytorch", "not built"),
        ("The NVIDIA driver on your system is too old (found version 11040)", "driver-too-old",
         "driver"),
        ("RuntimeError: CUDA error: device-side assert triggered", "device-side-assert", "refused"),
        ("RuntimeError: DataLoader worker (pid(s) 12, 13) exited unexpectedly", "worker-killed",
         "worker"),
        ("MemoryError", "out-of-memory-host", "memory"),
        ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7.28 TiB for an array",
         "out-of-memory-host", "memory"),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to",
         "out-of-memory-host", "memory"),
        ("OSError: [Errno 24] Too many open files", "too-many-files", "files"),
        ("OSError: [Errno 28] No space left on device", "disk-full", "disk"),
        ("OSError: [Errno 30] Read-only file system: '/lab/data/x'", "data-read-only", "write"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'photos/a.png'", "file-missing",
         "photos/a.png"),
        ("/opt/venv/bin/python: No module named pytest", "module-missing", "pytest"),
        ("RuntimeError: mat1 and mat2 shapes cannot be multiplied (64x512 and 256x10)", "shapes",
         "shapes"),
        ("RuntimeError: Expected all tensors to be on the same device, but found", "two-devices",
         "GPU"),
    ],
)  # fmt: skip
def test_messages_that_are_known(line: str, rule: str, word: str) -> None:
    log = f'Traceback\n  File "train.py"\n{line}\n'
    found = findings(material(log=log, run=run(exit_code=1, summary="failed with exit code 1")))
    assert set(found) == {rule}
    assert word in found[rule].what
    assert line.startswith(found[rule].evidence[0].text[:200])


def test_a_failed_installation_is_named_although_the_run_ended_well() -> None:
    log = (
        "ERROR: Could not find a version that satisfies the requirement timmm (from versions: )\n"
        "ERROR: No matching distribution found for timmm\n"
        "trained\n"
    )
    found = findings(material(log=log, run=run(exit_code=0, summary="done")))
    assert found["install-failed"].what == "pip did not install timmm"
    assert found["install-failed"].evidence[0].text.endswith("found for timmm")
    assert "install-failed" not in findings(
        material(log="see ERROR: No matching distribution found for x\n")
    )


def test_a_path_that_was_not_pushed_explains_the_exception() -> None:
    failed = run(exit_code=1, summary="failed with exit code 1")
    log = "Traceback\nFileNotFoundError: no tiles in data/tiles\n"
    assert set(findings(material(log=log, run=failed))) == {"exception"}
    left_out = LeftOutPath(path="data/tiles", rule="data/ in .gitignore", directory="data")
    assert set(findings(material(log=log, run=failed, left_out=left_out))) == {"file-ignored"}


def test_what_is_not_known_is_shown_as_it_is() -> None:
    failed = run(exit_code=1, summary="failed with exit code 1")
    found = findings(material(log="Traceback\nmylib.OddError: twelve\n", run=failed))
    assert "mylib.OddError: twelve" in found["exception"].what
    found = findings(material(log="going\nSegmentation fault\n", run=failed))
    assert found["failed"].evidence[1].text == "Segmentation fault"
    killed = findings(material(run=run(exit_code=137, summary="ended by SIGKILL (exit 137)")))
    assert "killed" in killed
    assert "lost" in findings(material(run=run(state="lost", exit_code=None, summary="lost: gone")))
    limit = run(state="lost", exit_code=None, summary="lost: its budget", stopped_by="budget")
    assert "budget" in findings(material(run=limit))["lost"].next
    lease = run(state="lost", exit_code=None, summary="stopped", stopped_by="GPU lease")
    assert "--recover --id" in findings(material(run=lease))["lost"].next
    assert findings(material(run=run(state="cancelled", exit_code=143))) == {}


def test_a_run_that_stands_still() -> None:
    live = run(state="running", exit_code=None, summary="", ended_at=None)
    curve = series("train/loss", FALLS[:10])
    made = material(curve, run=live, samples=samples(count=60, cpu_cores=0.01))
    assert "10 min" in findings(made)["stands-still"].what
    busy = material(curve, run=live, samples=samples(count=60))
    assert "stands-still" not in findings(busy)
    ended = material(curve, samples=samples(count=60, cpu_cores=0.01))
    assert "stands-still" not in findings(ended)


def test_nothing_at_all_is_said_to_be_nothing() -> None:
    made = material(log="", run=Run(id="x", lab_id="l", server_id="s", state="starting"))
    assert findings(made) == {}
    assert {"log", "telemetry", "loss"} <= set(unknown(made))


def test_problems_come_first_and_every_answer_is_whole() -> None:
    values = [*wobble(FALLS), NAN]
    made = material(series("train/loss", values), samples=samples(GpuSample(use_percent=40.0)))
    said = diagnose(made)
    levels = [one.level for one in said.findings]
    assert levels == sorted(levels, key=("problem", "advice", "good").index)
    for one in said.findings:
        assert all((one.what, one.why, one.next, one.evidence))
        assert one.source.url.startswith(("https://", "labctl docs "))
    assert all(one.what and one.why and one.next for one in said.unknown)


NUMBERS = st.floats(allow_nan=True, allow_infinity=True, width=32)
TAGS = st.sampled_from(
    ["train/loss", "val/loss", "lr", "grad_norm", "data_wait", "train/acc", "val/acc",
     "setup/workers", "setup/batch_size", "\x1b[2J", ""]
)  # fmt: skip
AMOUNTS = st.none() | st.floats(min_value=0, allow_nan=False, allow_infinity=True)
COUNTS = st.none() | st.integers(min_value=0, max_value=2**70)
GPUS = st.builds(
    GpuSample, uuid=st.sampled_from(["a", "b"]), use_percent=AMOUNTS, memory_bytes=COUNTS,
    memory_total_bytes=COUNTS, power_w=AMOUNTS, power_limit_w=AMOUNTS, sm_clock_mhz=AMOUNTS,
    sm_clock_max_mhz=AMOUNTS, throttle=st.just(("power", "odd")),
)  # fmt: skip
SAMPLES = st.builds(
    Sample, at=st.floats(0, 1e10), attempt=st.integers(0, 3), cpu_cores=AMOUNTS, cores=AMOUNTS,
    memory_bytes=COUNTS, memory_limit_bytes=COUNTS, shm_bytes=COUNTS, shm_limit_bytes=COUNTS,
    disk_read_bytes=COUNTS, gpus=st.lists(GPUS, max_size=2).map(tuple),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    curves=st.lists(st.tuples(TAGS, st.lists(NUMBERS, max_size=40)), max_size=5),
    taken=st.lists(SAMPLES, max_size=20),
    log=st.text(max_size=200),
    state=st.sampled_from(["starting", "running", "exited", "lost", "cancelled"]),
)
def test_no_input_makes_a_rule_fail(
    curves: list[tuple[str, list[float]]], taken: list[Sample], log: str, state: Any
) -> None:
    made = tuple(series(tag, values) for tag, values in curves)
    everything = material(
        scalars=Scalars(series=made, files=1),
        samples=tuple(taken),
        log=log,
        run=run(state=state, exit_code=None),
    )
    diagnose(everything)


def test_steps_may_be_anything() -> None:
    odd = Series(tag="train/loss", steps=(-5, 0, 2**62), values=(1.0, 2.0, 3.0), times=(0, 0, 0))
    diagnose(material(scalars=Scalars(series=(odd,))))


@pytest.mark.parametrize(
    ("command", "log", "program", "command_next"),
    [
        (("pyton", "train.py"), "entry.sh: 41: pyton: not found\n", "pyton",
         "labctl run -- python train.py"),
        (("torchrn", "train.py"), "", "torchrn", "labctl run -- torchrun train.py"),
        (("python", "train.py"), "", "python", "labctl run -- python3 train.py"),
        (("sh", "-c", "cd src && pyton 'a b.py'"), "x\nsh: 1: pyton: not found\n", "pyton",
         """labctl run -- sh -c 'cd src && python '"'"'a b.py'"'"''"""),
        (("bash", "-c", "zzzz9"), "bash: line 1: zzzz9: command not found\n", "zzzz9",
         "choose an image that has zzzz9, or correct its name, then:\nlabctl run"),
        (("nvidia-smi", "-L"), "entry.sh: 50: nvidia-smi: not found\n", "nvidia-smi",
         "labctl offers --gpu any   # servers with a GPU"),
        (("python3", "train.py"), "", "python3",
         "choose an image that has python3, or correct its name, then:\nlabctl run"),
    ],
)  # fmt: skip
def test_a_program_that_does_not_exist_is_named_with_the_one_that_was_meant(
    command: tuple[str, ...], log: str, program: str, command_next: str
) -> None:
    found = findings(material(log=log, run=run(exit_code=127, command=command)))
    finding = found["program-missing"]
    assert finding.what.startswith(f"the program {program} was not found")
    assert finding.next == command_next
    assert not {"failed", "exception"} & set(found)


@pytest.mark.parametrize(
    ("command", "log", "command_next"),
    [
        (("train.py", "--lr", "1"), "", "labctl run -- python train.py --lr 1"),
        (("sh", "-c", "train.py | tee x"), "sh: 1: train.py: not found\n",
         "labctl run -- sh -c 'python train.py | tee x'"),
    ],
)  # fmt: skip
def test_a_script_that_was_run_as_a_program_gets_its_interpreter(
    command: tuple[str, ...], log: str, command_next: str
) -> None:
    ended = run(exit_code=127, command=command)
    found = findings(material(log=log, run=ended, scripts=frozenset(("train.py",))))
    assert found["program-missing"].what == "train.py is a file of this lab and no program"
    assert found["program-missing"].next == command_next


def test_a_run_without_a_container_lacks_what_its_environment_lacks() -> None:
    ended = msgspec.structs.replace(run(exit_code=127, command=("zzzz9",)), executor="process")
    finding = findings(material(run=ended))["program-missing"]
    assert finding.why == (
        "the name is misspelled, or the run's environment does not contain this program"
    )
    assert finding.next.startswith("add the package that has zzzz9 to the requirements.txt")
    ended = msgspec.structs.replace(ended, exit_code=1)
    log = "ModuleNotFoundError: No module named 'yaml'\n"
    finding = findings(material(log=log, run=ended, package_file="deps.txt"))["module-missing"]
    assert finding.what == "the run's environment has no Python module yaml"
    assert "add it to deps.txt" in finding.next


def test_a_shell_that_says_nothing_of_a_program_ended_with_127_by_itself() -> None:
    found = findings(
        material(log="done\n", run=run(exit_code=127, command=("sh", "-c", "exit 127")))
    )
    assert "program-missing" not in found
    assert "failed" in found


@pytest.mark.parametrize(
    ("command", "command_next"),
    [
        (("src/train.py", "--lr", "1"), "labctl run -- python src/train.py --lr 1"),
        (("./train", "a"), "chmod +x ./train, then:\nlabctl run -- ./train a"),
    ],
)
def test_a_file_that_cannot_be_executed_has_a_next_command(
    command: tuple[str, ...], command_next: str
) -> None:
    log = f"/lab/run/.labctl/entry.sh: 34: {command[0]}: Permission denied\n"
    found = findings(material(log=log, run=run(exit_code=126, command=command)))
    assert found["failed"].what == f"{command[0]} cannot be executed"
    assert found["failed"].next == command_next


def test_a_script_that_python_cannot_open_is_a_missing_file() -> None:
    log = "python: can't open file '/lab/code/train.py': [Errno 2] No such file or directory\n"
    found = findings(material(log=log, run=run(exit_code=2, command=("python", "train.py"))))
    assert found["file-missing"].what == "the program train.py does not exist"
    assert "failed" not in found


def test_the_run_s_own_command_is_repeated_after_a_missing_module() -> None:
    log = "ModuleNotFoundError: No module named 'pandas'\n"
    command = ("python", "src/crash.py", "--name", "a b")
    found = findings(material(log=log, run=run(exit_code=1, command=command)))
    assert found["module-missing"].next.endswith(
        "then:\nlabctl run -- python src/crash.py --name 'a b'"
    )
