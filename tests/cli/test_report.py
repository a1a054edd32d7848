"""eval and report as they are typed: on what was pulled, damaged and hostile parts included."""

from __future__ import annotations

import json
import pickle
import shlex
import shutil
import sys
import webbrowser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from labctl.config import ensure_lab_id, find_paths
from labctl.model import Run
from labctl.state import State

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from event_files import scalar
from report_facts import BEGAN, data_uri, evaluation, png, sample

RUN = "1121-100000-abcd"


@pytest.fixture
def pulled(home: Path) -> Path:
    """A run on record, and what `labctl pull` brought of it."""
    root = home / "digits"
    own = ensure_lab_id(root)
    run = Run(
        id=RUN,
        lab_id=own,
        server_id="s1",
        state="exited",
        command=("python", "train.py"),
        started_at=BEGAN,
        ended_at=BEGAN + 60,
        summary="done",
        exit_code=0,
        created_at=BEGAN,
    )
    with State(find_paths().database) as state:
        state.save_run(run)
        code = {"commit": "e" * 40, "dirty": True, "changed": ["train.py"], "env": {"SEED": "1"}}
        state.record("code", lab_id=own, server_id="s1", run_id=RUN, detail=code)
        machine = {"cpus": 4, "memory_bytes": 2**34, "gpus": [{"name": "NVIDIA T4"}]}
        state.record("ready", lab_id=own, server_id="s1", detail=machine)
    directory = root / "runs" / RUN
    checkpoint = directory / "checkpoints" / "step-00000030"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text(
        '{"step": 30, "epoch": 3, "metrics": {"val_accuracy": 0.9}}'
    )
    (directory / "run.json").write_bytes(msgspec.json.encode(run))
    logs = directory / "logs"
    logs.mkdir()
    events = b"".join(scalar("val/loss", step, 1 / step) for step in (10, 20, 30))
    (logs / "events.out.tfevents.1.host.1.0").write_bytes(events)
    lines = [msgspec.json.encode(sample(10.0 * n)) for n in range(6)]
    (logs / "telemetry.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    (directory / "evaluation.json").write_bytes(msgspec.json.encode(evaluation()))
    return directory


def test_the_report_of_the_latest_run_lies_beside_it(labctl: Any, pulled: Path) -> None:
    said = labctl("report")
    assert said.code == 0, said.err
    assert said.out.startswith(f"runs/{RUN}/report.html (")
    assert "no evaluation on the server: labctl eval --on-server" in said.err
    page = (pulled / "report.html").read_text()
    for part in ("90.0%", "NVIDIA T4", "e" * 40, "chosen, step\u00a030", "cat/1.png"):
        assert part in page
    assert "The code had changes that are not in this commit: train.py" in page


def test_a_shell_that_has_ended_is_not_the_latest_run(labctl: Any, pulled: Path) -> None:
    with State(find_paths().database) as state:
        trained = state.list_runs()[-1]
        shell = msgspec.structs.replace(
            trained, id="shell", command=("bash",), created_at=trained.created_at + 1
        )
        state.save_run(shell)
    for command in ("report", "eval", "explain"):
        said = labctl(command)
        assert "shell" not in said.out + said.err
    assert labctl("report").out.startswith(f"runs/{RUN}/report.html (")
    assert "shell" in labctl("report", "shell").err
    with State(find_paths().database) as state:
        state.save_run(msgspec.structs.replace(shell, state="running", exit_code=None))
    assert "run shell" in labctl("explain").out + labctl("explain").err, "it can be attached to"


def test_an_evaluation_on_the_server_is_not_called_missing(labctl: Any, pulled: Path) -> None:
    there = msgspec.structs.replace(evaluation(), where="server")
    for name in ("evaluation.json", "evaluation-on-server.json"):
        (pulled / name).write_bytes(msgspec.json.encode(there))
    said = labctl("report")
    assert "evaluated on the server only; to check it on this machine: labctl eval\n" in said.err
    shutil.rmtree(pulled / "checkpoints")
    assert "on this machine: labctl pull && labctl eval\n" in labctl("report").err
    named = f"on this machine: labctl pull {RUN} && labctl eval {RUN}\n"
    assert named in labctl("report", RUN).err


def test_as_json_and_to_another_place_and_again(labctl: Any, pulled: Path) -> None:
    for _ in range(2):
        said = labctl("report", RUN, "--out", "hand-in/results.html", "--json")
        made = json.loads(said.out)["report"]
        assert (made["run"], Path(made["file"]).name) == (RUN, "results.html")
    assert [path.name for path in Path("hand-in").iterdir()] == ["results.html"]
    assert made["bytes"] == Path("hand-in/results.html").stat().st_size


@pytest.mark.parametrize("words", [[], [RUN], ["--out", "hand in/page.html"]])
def test_the_suggested_command_opens_the_report_that_was_written(
    labctl: Any, pulled: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: not opened.append(address))
    said = labctl("report", *words)
    written = Path(said.out.rpartition(" (")[0]).absolute()
    suggested = said.err.splitlines()[-1].partition("   ")[0]
    assert labctl(*shlex.split(suggested)[1:]).code == 0
    assert opened == [written.as_uri()]


def test_without_a_browser_the_address_is_shown(
    labctl: Any, pulled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webbrowser, "open", lambda address: False)
    said = labctl("report", RUN, "--open")
    page = (pulled / "report.html").absolute().as_uri()
    assert said.code == 0
    assert f"no browser was found on this machine; open it yourself: {page}" in said.err


def test_a_run_without_telemetry_curves_and_evaluation(labctl: Any, pulled: Path) -> None:
    (pulled / "evaluation.json").unlink()
    for path in (pulled / "logs").iterdir():
        path.unlink()
    said = labctl("report")
    assert said.code == 0
    assert "no evaluation: no evaluate.py in this lab\n" in said.err
    Path("evaluate.py").touch()
    assert labctl("report").err.count("no evaluation: labctl eval\n") == 1
    for part in ("no curves", "no telemetry"):
        assert part in said.err
    assert "Not evaluated yet" in (pulled / "report.html").read_text()


def test_before_the_pull_nothing_is_said_about_the_run_itself(labctl: Any, pulled: Path) -> None:
    shutil.rmtree(pulled / "logs")
    (pulled / "run.json").unlink()
    said = labctl("report")
    assert "no curves or telemetry: the run was not downloaded completely: labctl pull" in said.err
    assert "too short" not in said.err


def test_damaged_parts_are_left_out_and_named(labctl: Any, pulled: Path) -> None:
    events = pulled / "logs" / "events.out.tfevents.1.host.1.0"
    events.write_bytes(events.read_bytes()[:-7])
    (pulled / "evaluation.json").write_text('{"accuracy": NaN}')
    (pulled / "evaluation-on-server.json").write_bytes(
        msgspec.json.encode(evaluation(where="server"))
    )
    broken = pulled / "checkpoints" / "step-00000040"
    broken.mkdir()
    (broken / "manifest.json").write_text('{"step": 1e999, "metrics": []}')
    with (pulled / "logs" / "telemetry.jsonl").open("ab") as file:
        file.write(b'{"at": 17637')
    said = labctl("report")
    assert said.code == 0
    page = (pulled / "report.html").read_text()
    for part in ("skipped evaluation.json", "ends in the middle of a record"):
        assert part in said.err
        assert part in page
    assert "90.0%" in page


SPEEDUP = {
    "device": "cpu",
    "backend": "gloo",
    "batch_size": 60,
    "rows": [
        {"variant": "alone", "processes": 1, "seconds_per_step": 0.010},
        {"variant": "fp16", "processes": 2, "seconds_per_step": 0.008, "bytes_per_step": 2048.0},
    ],
}


def test_a_measured_speed_up_is_drawn(labctl: Any, pulled: Path) -> None:
    (pulled / "logs" / "speedup.json").write_text(json.dumps(SPEEDUP))
    assert labctl("report").code == 0
    page = (pulled / "report.html").read_text().replace("\u00a0", " ")
    for part in (">Speed-up</h2>", "Measured on cpu with gloo.", "8 ms", "2.0 KiB", ">1.25<"):
        assert part in page


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"rows": [', "truncated"),
        ("[" * 100_000, ""),
        ('{"rows": []}', "no row has 1 process"),
        ('{"rows": [{"variant": "x", "processes": 0, "seconds_per_step": 1}]}', ">= 1"),
        ('{"rows": [{"variant": "x", "processes": 1, "seconds_per_step": 0}]}', "> 0"),
        ('{"rows": [{"variant": "x", "processes": 1, "seconds_per_step": NaN}]}', "malformed"),
        ('{"rows": []}' + " " * 2**20, "larger than 1 MiB"),
    ],
)
def test_a_damaged_speed_up_is_left_out_and_named(
    labctl: Any, pulled: Path, text: str, why: str
) -> None:
    (pulled / "logs" / "speedup.json").write_text(text)
    said = labctl("report")
    assert said.code == 0
    message = " ".join(said.err.split())
    assert "skipped speedup.json: " in message
    assert why in message
    page = (pulled / "report.html").read_text()
    assert "skipped speedup.json" in page
    assert ">Speed-up</h2>" not in page


def test_a_picture_through_a_link_is_not_shown(labctl: Any, pulled: Path) -> None:
    secret = pulled.parents[2] / "private.png"
    secret.write_bytes(png(9, 9))
    (pulled / "link.png").symlink_to(secret)
    (pulled / "own.png").write_bytes(png(7, 7))
    found = evaluation()
    worst = [
        msgspec.structs.replace(found.worst[0], picture=name) for name in ("link.png", "own.png")
    ]
    shown = msgspec.structs.replace(found, worst=tuple(worst))
    (pulled / "evaluation.json").write_bytes(msgspec.json.encode(shown))
    labctl("report")
    page = (pulled / "report.html").read_text()
    assert data_uri(png(7, 7)) in page
    assert data_uri(png(9, 9)) not in page


def test_a_record_begun_anew_still_has_its_report(labctl: Any, pulled: Path) -> None:
    find_paths().database.unlink()
    said = labctl("report")
    assert said.code == 0, said.err
    assert "Git commit</dt><dd><span>not measured" in (pulled / "report.html").read_text().replace(
        ' class="absent"', ""
    )


def test_a_report_of_nothing(labctl: Any, home: Path) -> None:
    assert labctl("report").code == 4
    assert labctl("report", "../../etc").code == 4
    said = labctl("report", "no-such-run")
    assert (said.code, "has no runs yet" in said.err) == (4, True)


def test_a_report_that_cannot_be_written(labctl: Any, pulled: Path) -> None:
    (pulled / "report.html").mkdir()
    said = labctl("report")
    assert said.code == 1
    assert "labctl report --out FILE" in said.err
    assert not list(pulled.glob(".report*"))


def test_eval_refuses_a_pickle_and_says_what_to_save_instead(labctl: Any, pulled: Path) -> None:
    """The server of the run has ended."""
    (pulled.parents[1] / "evaluate.py").write_text("raise SystemExit('it was run')\n")
    (pulled / "checkpoints" / "step-00000030" / "model.safetensors").write_bytes(
        pickle.dumps(["weights"])
    )
    said = labctl("eval")
    assert said.code == 3
    assert "model.safetensors is a pickle" in said.err
    assert "next: labctl run\n        (after saving safetensors instead)\n" in said.err


def test_eval_of_what_is_not_there(labctl: Any, pulled: Path, tmp_path: Path) -> None:
    said = labctl("eval", "step-00000099")
    assert said.code == 4
    assert "step-00000030" in said.err
    (tmp_path / "elsewhere").mkdir()
    assert labctl("eval", str(tmp_path / "elsewhere")).code == 2
    assert labctl("eval", "--on-server", "--time-limit", "long").code == 2


EVALUATE = """
import json, os, pathlib, sys
assert pathlib.Path(sys.argv[1]).is_dir()
body = pathlib.Path("body.json")
if body.exists():
    pathlib.Path(os.environ["LABCTL_EVALUATION"]).write_bytes(body.read_bytes())
print("words before")
print(json.dumps({"accuracy": 0.9, "checkpoint": "step-00000030", "total": 20}))
"""


@pytest.mark.train
class TestEval:
    @pytest.fixture
    def lab(self, pulled: Path) -> Path:
        (pulled / "evaluation.json").unlink()
        root = pulled.parents[1]
        (root / "evaluate.py").write_text(EVALUATE)
        (root / "body.json").write_bytes(msgspec.json.encode(evaluation(where="server")))
        return root

    def test_what_it_finds_is_kept_and_compared(self, labctl: Any, lab: Path, pulled: Path) -> None:
        (pulled / "logs" / "evaluation.json").write_bytes(
            msgspec.json.encode(evaluation(where="server"))
        )
        said = labctl("eval", "step-00000030", "--json")
        found = json.loads(said.out)["evaluation"]
        assert (said.code, found["same"], found["total"]) == (0, True, 20)
        kept = json.loads((pulled / "evaluation.json").read_text())
        assert (kept["where"], kept["accuracy"]) == ("here", 0.9)
        assert not list(pulled.glob(".evaluation*"))
        shown = labctl("eval").out
        assert "here:          0.9000  (step-00000030)\non the server: 0.9000  the same\n" in shown
        assert "correct:       18 of 20 on test; 95% interval 0.6990 to 0.9721" in shown

    def test_another_figure_on_the_server_is_exit_1(
        self, labctl: Any, lab: Path, pulled: Path
    ) -> None:
        told = {"accuracy": 0.8, "checkpoint": "step-00000030"}
        (pulled / "logs" / "metrics.json").write_text(json.dumps(told))
        said = labctl("eval", f"runs/{RUN}/checkpoints/step-00000030")
        assert (said.code, "on the server: 0.8000  DIFFERENT" in said.out) == (1, True)
        (pulled / "logs" / "metrics.json").write_text(json.dumps(told | {"checkpoint": "step-1"}))
        said = labctl("eval", RUN)
        assert (said.code, "on the server: not measured" in said.out) == (0, True)

    def test_a_program_that_tells_its_accuracy_alone(
        self, labctl: Any, lab: Path, pulled: Path
    ) -> None:
        (lab / "body.json").unlink()
        said = labctl("eval")
        assert (said.code, said.out.splitlines()[0]) == (
            0,
            "here:          0.9000  (step-00000030)",
        )
        assert "only its accuracy" in said.err
        kept = json.loads((pulled / "evaluation.json").read_text())
        assert (kept["accuracy"], kept["items"], kept["classes"]) == (0.9, 20, [])
        said = labctl("report")
        assert (said.code, "no evaluation:" in said.err) == (0, False)
        page = " ".join((pulled / "report.html").read_text().split())
        assert "18 of 20 items. The 95% confidence interval" in page
        assert "Classes, confusions and mistakes: not measured." in page

    @pytest.mark.parametrize(
        ("printed", "shown"),
        [
            ({"accuracy": 0.9}, "evaluate.py printed no number of items"),
            ({"accuracy": 0.9, "total": 10**30}, "evaluate.py printed no number of items"),
            ({"accuracy": 93.1, "total": 20}, "Not evaluated yet"),
        ],
    )
    def test_an_accuracy_without_items_or_above_1_spoils_no_report(
        self, labctl: Any, lab: Path, pulled: Path, printed: dict[str, float], shown: str
    ) -> None:
        (lab / "evaluate.py").write_text(f"print({json.dumps(json.dumps(printed))})\n")
        assert labctl("eval").code == 0
        assert labctl("report").code == 0
        assert shown in (pulled / "report.html").read_text()

    def test_what_it_wrote_is_not_believed_without_a_look(
        self, labctl: Any, lab: Path, pulled: Path
    ) -> None:
        (lab / "body.json").write_text('{"accuracy": 2}')
        said = labctl("eval")
        assert (
            said.code,
            "the file that evaluate.py wrote is not a valid evaluation" in said.err,
        ) == (1, True)
        assert [path.name for path in pulled.glob("*evaluation*")] == []

    def test_a_program_that_fails_is_quoted(self, labctl: Any, lab: Path) -> None:
        (lab / "evaluate.py").write_text("raise SystemExit('no such data')")
        said = labctl("eval")
        assert (said.code, "no such data" in said.err) == (1, True)


def test_own_text_is_on_the_page_and_on_slides(labctl: Any, pulled: Path) -> None:
    Path("notes.md").write_text("# What we *tried*\n\n<b>raw</b> ![x](../../etc/passwd)\n")
    said = labctl("report")
    assert "the picture ../../etc/passwd is not shown: it is not below the lab" in said.err
    page = (pulled / "report.html").read_text()
    assert "<h3>What we tried</h3>" in page
    assert "&lt;b&gt;raw&lt;/b&gt;" in page
    said = labctl("report", "--slides")
    assert said.out.startswith(f"runs/{RUN}/slides.html (")
    assert "labctl report --slides --open" in said.err
    assert "<h2>What we tried</h2>" in (pulled / "slides.html").read_text()


@pytest.mark.browser
def test_a_pdf_of_the_report(labctl: Any, pulled: Path) -> None:
    said = labctl("report", "--pdf")
    assert said.code == 0, said.err
    assert said.out.startswith(f"runs/{RUN}/report.pdf (")
    assert (pulled / "report.pdf").read_bytes().startswith(b"%PDF-")


def test_without_a_browser_there_is_no_pdf(
    labctl: Any, pulled: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    said = labctl("report", "--slides", "--pdf")
    assert said.code == 4
    assert "apt-get install chromium" in said.err
    assert not (pulled / "slides.pdf").exists()
