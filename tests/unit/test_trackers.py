"""What a run gets for MLflow and Weights & Biases: variables, files, a resume, a common view."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from labctl.agent.runs import mlflow_run, mlflow_view
from labctl.agent.runs.runs import read_entry_script
from labctl.agent.runs.trackers import write_tracker_files
from labctl.config import load_lab
from labctl.errors import ConfigError
from labctl.runs.tracking import build_tracking_env

SCHEMA = """
CREATE TABLE experiments (
  experiment_id INTEGER PRIMARY KEY, name TEXT UNIQUE, artifact_location TEXT {more});
CREATE TABLE runs (run_uuid TEXT PRIMARY KEY, experiment_id INTEGER, artifact_uri TEXT);
CREATE TABLE metrics (
  key TEXT, value REAL, step INTEGER, run_uuid TEXT, PRIMARY KEY (key, step, run_uuid));
"""


def write_database(path: Path, run_id: str, steps: int, number: int = 1, more: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(SCHEMA.format(more=more))
        place = f"/lab/run/logs/mlflow/artifacts/{number}"
        values = [number, "digits", place, *(["x"] if more else [])]
        marks = ", ".join("?" for _ in values)
        connection.execute(f"INSERT INTO experiments VALUES ({marks})", values)
        uri = f"file:///lab/run/logs/mlflow/artifacts/{run_id}"
        connection.execute("INSERT INTO runs VALUES (?, ?, ?)", (run_id, number, uri))
        rows = [("loss", 1 / (step + 1), step, run_id) for step in range(steps)]
        connection.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?)", rows)
        connection.commit()


def read_rows(path: Path, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchall()


def load(folder: Path, text: str) -> dict[str, str]:
    (folder / "lab.yaml").write_text(f"lab: digits\n{text}")
    return build_tracking_env(load_lab(folder, environ={"HOME": str(folder)}), "r1")


def test_lab_yaml_asks_for_trackers(tmp_path: Path) -> None:
    assert load(tmp_path, "") == {}
    assert load(tmp_path, "services: {mlflow: {}}\n") == {"LABCTL_TRACK_MLFLOW": "digits"}
    own = load(tmp_path, "services: {mlflow: {port: 5001, command: mlflow ui}}\n")
    assert own == {}
    found = load(tmp_path, "track: {wandb: offline}\nenv: {WANDB_PROJECT: other}\n")
    assert found == {
        "LABCTL_TRACK_WANDB": "offline",
        "WANDB_MODE": "offline",
        "WANDB_PROJECT": "other",
        "WANDB_RUN_ID": "r1",
        "WANDB_RESUME": "allow",
    }


@pytest.mark.parametrize("text", ["track: {wandb: sometimes}", "track: {mlflow: yes}", "track: 3"])
def test_other_values_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        load(tmp_path, text)


def test_online_needs_the_key_as_a_secret(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, "track: {wandb: online}\n")
    assert "secrets: [WANDB_API_KEY]" in str(raised.value.problems)
    assert load(tmp_path, "track: {wandb: online}\nsecrets: [WANDB_API_KEY]\n")


def run_entry(run: Path, env: dict[str, str], command: str) -> str:
    """Run a command by the entry script, as in a container; return its log."""
    (run / ".labctl").mkdir(parents=True, exist_ok=True)
    (run / "logs").mkdir(exist_ok=True)
    entry = run / ".labctl" / "entry.sh"
    entry.write_text(read_entry_script())
    write_tracker_files(run / ".labctl", env)
    (run / ".labctl" / "exit.json").unlink(missing_ok=True)
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {"PATH": programs, "LABCTL_LOG_DIR": str(run / "logs"), "LABCTL_RUN_ID": "r1"}
    variables |= {"HOME": str(run), "LABCTL_SECRETS_DIR": str(run / "none")}
    words = ["sh", str(entry), "sh", "-c", command]
    subprocess.run(words, env=variables | env, stdin=subprocess.DEVNULL, check=True)
    return (run / "logs" / "run.log").read_text()


def test_the_entry_script_sets_paths_below_the_logs(tmp_path: Path) -> None:
    run = tmp_path / "r1"
    env = {"LABCTL_TRACK_WANDB": "offline"}
    assert run_entry(run, env, "echo $WANDB_DIR-$MLFLOW_TRACKING_URI") == f"{run}/logs-\n"
    (run / "logs" / "run.log").unlink()
    assert run_entry(tmp_path / "r2", {}, "echo -$WANDB_DIR-") == "--\n"
    assert not (tmp_path / "r2" / ".labctl" / "trackers.sh").exists()


def test_a_run_without_mlflow_goes_on_and_says_so(tmp_path: Path) -> None:
    run = tmp_path / "r1"
    # A module of this name that fails stands for an image without the package.
    (run / "broken").mkdir(parents=True)
    (run / "broken" / "mlflow.py").write_text("raise ImportError('no mlflow here')")
    env = {"LABCTL_TRACK_MLFLOW": "digits", "PYTHONPATH": str(run / "broken")}
    log = run_entry(run, env, "echo trained-$MLFLOW_TRACKING_URI-")
    assert "no mlflow here" in log
    assert "labctl: MLflow does not track this run: add mlflow to the packages" in log
    assert log.endswith("trained--\n")


def test_an_earlier_mlflow_run_is_found_again_without_mlflow(tmp_path: Path) -> None:
    run = tmp_path / "r1"
    folder = run / "logs" / "mlflow"
    write_database(folder / "mlflow.db", "abc123", 3)
    (folder / "run-id").write_text("abc123")
    env = {"LABCTL_TRACK_MLFLOW": "digits", "PYTHONPATH": str(tmp_path)}
    log = run_entry(run, env, 'echo "$MLFLOW_RUN_ID $MLFLOW_TRACKING_URI $MLFLOW_EXPERIMENT_NAME"')
    assert log == f"abc123 sqlite:///{folder}/mlflow.db digits\n"
    # The second of several servers does not track.
    assert run_entry(run, env | {"RANK": "1"}, "echo -$MLFLOW_RUN_ID-").endswith("--\n")


def test_the_copy_replaces_a_missing_damaged_or_older_database(tmp_path: Path) -> None:
    folder = tmp_path / "mlflow"
    database, copy = folder / "mlflow.db", folder / "copy.db"
    write_database(database, "abc", 5)
    mlflow_run.copy_database(folder)
    assert mlflow_run.count_metrics(copy) == 5
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("DELETE FROM metrics WHERE step > 1")
        connection.commit()
    mlflow_run.restore(folder)
    assert (mlflow_run.count_metrics(database), copy.exists()) == (5, False)
    mlflow_run.copy_database(folder)
    database.write_bytes(database.read_bytes()[:5000])
    mlflow_run.restore(folder)
    assert mlflow_run.count_metrics(database) == 5
    assert (folder / "mlflow.db.damaged").exists()
    mlflow_run.copy_database(folder)
    database.unlink()
    mlflow_run.restore(folder)
    assert mlflow_run.has_run(database, "abc")


def test_the_view_has_the_runs_of_all_databases(tmp_path: Path) -> None:
    view, runs = tmp_path / "view.db", tmp_path / "runs"
    with closing(sqlite3.connect(view)) as connection:
        # The server's schema may have a column more, and so may that of a run.
        connection.executescript(SCHEMA.format(more=", stage TEXT"))
        connection.execute("INSERT INTO experiments VALUES (0, 'Default', '', 'x')")
        connection.commit()
    for number, name in enumerate(("one", "two"), 1):
        source = runs / name / "logs" / "mlflow" / "mlflow.db"
        write_database(source, name * 3, 4, number, more=", other TEXT" if number == 2 else "")
        for _ in range(2):
            mlflow_view.merge(source, view)
    assert read_rows(view, "SELECT count(*) FROM experiments WHERE name = 'digits'") == [(1,)]
    rows = read_rows(view, "SELECT run_uuid, experiment_id, artifact_uri FROM runs ORDER BY 1")
    place = (runs / "one" / "logs" / "mlflow" / "artifacts" / "oneoneone").as_uri()
    assert rows[0] == ("oneoneone", 1, place)
    assert rows[1][:2] == ("twotwotwo", 1)
    assert read_rows(view, "SELECT count(*) FROM metrics") == [(8,)]


def test_a_damaged_database_is_no_part_of_the_view_and_stops_nothing(tmp_path: Path) -> None:
    runs, view = tmp_path / "runs", tmp_path / "view.db"
    (runs / "bad" / "logs" / "mlflow").mkdir(parents=True)
    (runs / "bad" / "logs" / "mlflow" / "mlflow.db").write_bytes(b"no database" * 1000)
    write_database(runs / "good" / "logs" / "mlflow" / "mlflow.db", "good", 2)
    with closing(sqlite3.connect(view)) as connection:
        connection.executescript(SCHEMA.format(more=""))
        # The server's own experiment is the last thing that it makes; until then nothing is added.
        assert not mlflow_view.is_ready(view)
        connection.execute("INSERT INTO experiments VALUES (0, 'Default', '')")
        connection.commit()
    program = [sys.executable, mlflow_view.__file__, str(runs), str(view)]
    process = subprocess.Popen(program, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 20
        while not read_rows(view, "SELECT 1 FROM runs") and time.monotonic() < deadline:
            time.sleep(0.1)
        assert read_rows(view, "SELECT run_uuid FROM runs") == [("good",)]
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=10)
    assert errors.startswith("bad: ")


def test_an_unknown_mode_names_those_that_exist(tmp_path: Path) -> None:
    (tmp_path / "lab.yaml").write_text("lab: digits\ntrack: {wandb: maybe}\n")
    with pytest.raises(ConfigError) as caught:
        load_lab(tmp_path, environ={"HOME": str(tmp_path)})
    assert caught.value.problems[0].message == "'maybe' is not one of offline, online"
