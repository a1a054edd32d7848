"""`explain` from the server to the last word: logs alone are fetched, whatever is in them."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path

import pytest
from lab_world import LAB_ID, Recorded, World, unreachable, world

from labctl.errors import NotFoundError
from labctl.estimate.plan import ModelMeasurement, ModelPlan
from labctl.insight.explain.memory import OutOfMemory
from labctl.insight.explanation import Explanation
from labctl.insight.explanation import explain as explain_run
from labctl.insight.memory_fit import compute_fit
from labctl.lifecycle.reconcile import fetch_logs
from labctl.lifecycle.up import up
from labctl.model import Run
from labctl.runs import runs
from labctl.servers.context import LabContext

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from event_files import curve

GIB = 1024**3
FALLS = [2.3 * math.exp(-number / 10) + 0.05 for number in range(60)]
EVENTS = "events.out.tfevents.1700000000.host.1.0"


def line(number: int) -> str:
    gpu = {"uuid": "GPU-1", "name": "NVIDIA T4", "use_percent": 4.0, "memory_bytes": 10**9}
    body = {"at": 1.7e9 + 10 * number, "attempt": 1, "cores": 8, "cpu_cores": 1.0, "gpus": [gpu]}
    return json.dumps(body) + "\n"


@pytest.fixture
def there(tmp_path: Path) -> World:
    """A lab with a server, on which the run `night` has ended."""
    made = world(tmp_path)
    up(made.context())
    directory = made.machine.run_with("night", **{"model.safetensors": "weights"})
    logs = directory / "logs"
    logs.joinpath(EVENTS).write_bytes(curve("train/loss", FALLS))
    logs.joinpath("telemetry.jsonl").write_text("".join(line(number) for number in range(30)))
    logs.joinpath("run.log").write_text("all went well\n")
    server = made.context().get_server()
    run = Run(id="night", lab_id=LAB_ID, server_id=server.id, state="running", created_at=5.0)
    made.context().state.save_run(run)
    return made


def explain(context: LabContext, run_id: str = "") -> Explanation:
    return explain_run(context, fetch_logs(context, run_id))


def logs_of(there: World) -> Path:
    return there.machine.home / "labctl" / "digits" / "runs" / "night" / "logs"


def test_logs_alone_are_fetched_and_every_part_of_them_is_read(there: World) -> None:
    found = explain(there.context())
    assert found.run.state == "exited"
    assert (found.read.samples, found.read.curves, found.read.points) == (30, 1, 60)
    assert [one.rule for one in found.findings] == ["gpu-idle", "loss-falls"]
    home = there.home / "lab" / "runs" / "night"
    assert (home / "logs" / EVENTS).is_file()
    assert not (home / "checkpoints").exists()


def test_what_was_fetched_for_it_does_not_count_as_pulled(there: World) -> None:
    from labctl.runs import outputs

    context = there.context()
    explain(context)
    (lacking,) = outputs.list_missing(context, context.get_server())
    assert lacking.path == "checkpoints/model.safetensors"
    (pulled,) = outputs.pull(context, context.get_server(), ["night"])
    assert (pulled.files, pulled.complete) == (1, True)


def test_event_files_cut_in_the_middle_and_telemetry_cut_in_its_last_line(there: World) -> None:
    logs = logs_of(there)
    whole = (logs / EVENTS).read_bytes()
    (logs / EVENTS).write_bytes(whole[: len(whole) - 20])
    text = (logs / "telemetry.jsonl").read_text()
    (logs / "telemetry.jsonl").write_text("not json\n\x00\x00\n" + text[:-30])
    found = explain(there.context())
    assert (found.read.samples, found.read.points) == (29, 59)
    (flaw,) = found.read.flaws
    assert (flaw.file, flaw.cut) == (EVENTS, True)


def test_a_run_that_left_nothing_is_told_as_unknown(there: World) -> None:
    for path in logs_of(there).iterdir():
        path.unlink()
    found = explain(there.context())
    assert found.findings == ()
    assert {"telemetry", "loss", "log"} <= {one.rule for one in found.unknown}


def test_nan_in_all_that_a_run_writes(there: World) -> None:
    logs = logs_of(there)
    (logs / EVENTS).write_bytes(curve("train/loss", [math.nan] * 40))
    (logs / "telemetry.jsonl").write_text('{"at": NaN, "cpu_cores": NaN}\n' * 5)
    (logs / "progress.json").write_text(
        '{"loss": NaN, "step": 3, "far": 1e999, "big": 1%s}' % ("0" * 400)
    )
    own = logs.parent / ".labctl"
    own.joinpath("record.json").unlink()
    own.joinpath("spec.json").write_text(json.dumps({"lab_id": LAB_ID, "outputs": ["logs"]}))
    context = there.context()
    found = explain(context)
    assert [one.rule for one in found.findings] == ["loss-nan-from-the-start"]
    assert found.run.progress == {"step": 3.0}
    # It is on record now, and a record with NaN could not be read any more.
    assert runs.find_run(there.context(), "night").progress == {"step": 3.0}


def test_without_its_server_what_was_fetched_before_counts(there: World) -> None:
    explain(there.context())
    there.machine.error = unreachable()
    reporter = Recorded()
    context = there.context(reporter)
    found = explain(context, "night")
    assert found.read.samples == 30
    assert reporter.said == ""  # it had ended, and all of its logs were here
    run = runs.find_run(context, "night")
    context.state.save_run(Run(id="night", lab_id=LAB_ID, server_id=run.server_id, state="running"))
    explain(context, "night")
    assert "using the logs that were pulled before" in reporter.said


def test_without_anything_the_way_is_named(there: World) -> None:
    there.machine.error = unreachable()
    with pytest.raises(NotFoundError, match="no logs of run night on this machine") as caught:
        explain(there.context())
    assert caught.value.why
    with pytest.raises(NotFoundError):
        explain(there.context(), "never-was")
    shutil.rmtree(there.home / "lab" / "runs", ignore_errors=True)


def test_a_run_of_an_earlier_server_is_not_asked_of_this_one(there: World) -> None:
    context = there.context()
    context.state.save_run(Run(id="old", lab_id=LAB_ID, server_id="gone", state="exited"))
    with pytest.raises(NotFoundError) as caught:
        explain(context, "old")
    assert "the server of run old is gone" in caught.value.why


def test_runs_beside_the_work_are_never_the_latest(there: World) -> None:
    state = there.context().state
    for number, name in enumerate(("profile-1", "probe-1")):
        state.save_run(
            Run(id=name, lab_id=LAB_ID, server_id="s", state="exited", created_at=90.0 + number)
        )
    assert runs.find_run(there.context()).id == "night"
    assert runs.find_run(there.context(), "profile-1").id == "profile-1"


@pytest.mark.parametrize(
    ("item", "limit", "batch"),
    [
        (GIB, 16 * GIB, 8),
        (GIB, 9 * GIB, 4),
        (GIB, 2 * GIB, 0),
        (0, 16 * GIB, 0),
        (1, 5 * GIB, 2**30),
    ],
)
def test_the_batch_that_fits(item: int, limit: int, batch: int) -> None:
    model = ModelMeasurement(
        parameters=GIB // 4,
        weight_bytes=GIB,
        trained_parameters=GIB // 4,
        trained_bytes=GIB,
        fixed_bytes=0,
        item_bytes=item,
        item_flops=1,
        input_shape=(3, 224, 224),
    )
    plan = ModelPlan(precision="fp32", optimizer="momentum", measured=model)
    found = OutOfMemory(whose="gpu", limit_bytes=limit, batch=64, evidence=())
    fit = compute_fit(plan, found, "train.py:build_model")
    # Weights, gradients and one state of 1 GiB each, and the overhead of 1 GiB.
    assert (fit.fixed_bytes, fit.batch, fit.item) == (4 * GIB, batch, "3x224x224")
    inside = compute_fit(
        plan, OutOfMemory(whose="container", limit_bytes=limit, batch=1, evidence=()), ""
    )
    assert inside.fixed_bytes == 3 * GIB + 256 * 1024**2
