"""Creates the MLflow run of a labctl run, and keeps a copy of its database.

The run's own Python executes this file, in the image of the run: `mlflow_run.py open` prints the
id of the MLflow run, which is created once; `mlflow_run.py copy` copies the database until it is
ended. The database is in the run's logs, so that the mirror and pulls have it. A file that is open
for writing is not mirrored while the run lasts, so the copy is what a recovered run goes on from
after a sudden loss of the server.
"""

import importlib
import os
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Optional

DATABASE, COPY, RUN_ID = "mlflow.db", "copy.db", "run-id"
COPY_EVERY_S = 20.0


def main() -> None:
    folder = Path(os.environ["LABCTL_LOG_DIR"]) / "mlflow"
    if sys.argv[1] == "copy":
        keep_copy(folder)
    folder.mkdir(parents=True, exist_ok=True)
    print(open_run(folder, os.environ["LABCTL_TRACK_MLFLOW"], os.environ["LABCTL_RUN_ID"]))


def open_run(folder: Path, experiment: str, name: str) -> str:
    """Return the id of this run's MLflow run: the one of an earlier attempt, else a new one."""
    marker = folder / RUN_ID
    restore(folder)
    if marker.is_file() and has_run(folder / DATABASE, marker.read_text().strip()):
        return marker.read_text().strip()
    run_id = create_run(folder, experiment, name)
    staging = folder / (RUN_ID + ".new")
    staging.write_text(run_id)
    staging.replace(marker)
    return run_id


def create_run(folder: Path, experiment: str, name: str) -> str:
    tracking = importlib.import_module("mlflow.tracking")
    client = tracking.MlflowClient(f"sqlite:///{folder / DATABASE}")
    found = client.get_experiment_by_name(experiment)
    if found is None:
        artifacts = (folder / "artifacts").as_uri()
        experiment_id = client.create_experiment(experiment, artifact_location=artifacts)
    else:
        experiment_id = found.experiment_id
    run = client.create_run(experiment_id, run_name=name, tags={"labctl.run": name})
    return str(run.info.run_id)


def restore(folder: Path) -> None:
    """Put the copy in place of the database if that is missing, damaged or has fewer metrics."""
    database, newer = folder / DATABASE, folder / COPY
    count, newer_count = count_metrics(database), count_metrics(newer)
    if count is None and database.exists():
        database.replace(folder / (DATABASE + ".damaged"))
    if newer_count is not None and (count is None or newer_count > count):
        newer.replace(database)


def count_metrics(database: Path) -> Optional[int]:
    """Return the number of logged values; None for a missing or damaged database."""
    if not database.is_file():
        return None
    try:
        with closing(sqlite3.connect(str(database), timeout=10)) as connection:
            if connection.execute("PRAGMA quick_check").fetchone() != ("ok",):
                return None
            return int(connection.execute("SELECT count(*) FROM metrics").fetchone()[0])
    except sqlite3.Error:
        return None


def has_run(database: Path, run_id: str) -> bool:
    if not database.is_file():
        return False
    try:
        with closing(sqlite3.connect(str(database), timeout=10)) as connection:
            query = "SELECT 1 FROM runs WHERE run_uuid = ?"
            return connection.execute(query, (run_id,)).fetchone() is not None
    except sqlite3.Error:
        return False


def keep_copy(folder: Path) -> None:
    """Copy the database whenever it has changed, until somebody ends this process."""
    copied_at = 0
    while True:
        time.sleep(COPY_EVERY_S)
        try:
            changed_at = (folder / DATABASE).stat().st_mtime_ns
            if changed_at != copied_at:
                copy_database(folder)
                copied_at = changed_at
        except (OSError, sqlite3.Error):
            continue  # it is being written: next time


def copy_database(folder: Path) -> None:
    """Copy the database at once, as of one moment, by SQLite's own backup."""
    staging = folder / (COPY + ".tmp")
    if staging.exists():
        staging.unlink()
    source = f"file:{folder / DATABASE}?mode=ro"
    connection = sqlite3.connect(source, uri=True, timeout=10)
    with closing(connection) as database, closing(sqlite3.connect(str(staging))) as target:
        database.backup(target)
    staging.replace(folder / COPY)


if __name__ == "__main__":
    main()
