"""Shows the MLflow runs of all runs of a lab in one database, for MLflow's server.

Each run has a database of its own in its logs; the service executes this file beside the server:
`mlflow_view.py RUNS DATABASE`. The server creates the database, and this program adds what the runs
have logged, again whenever one of them has changed.
"""

import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Dict, List

EVERY_S = 4.0
MOST_ROWS = 2_000_000
# In the order in which their rows refer to each other.
TABLES = (
    "runs",
    "params",
    "tags",
    "metrics",
    "latest_metrics",
    "logged_models",
    "logged_model_params",
    "logged_model_tags",
    "logged_model_metrics",
)
# Columns with the directory of a run's artifacts, as the run itself sees it.
PLACES = ("artifact_uri", "artifact_location")
BELOW_LOGS = "/logs/mlflow/"


def main() -> None:
    runs, database = Path(sys.argv[1]), Path(sys.argv[2])
    seen: Dict[Path, int] = {}
    while True:
        if is_ready(database):
            for source in sorted(runs.glob("*/logs/mlflow/mlflow.db")):
                try:
                    changed_at = source.stat().st_mtime_ns
                    if seen.get(source) != changed_at:
                        merge(source, database)
                        seen[source] = changed_at
                except (OSError, sqlite3.Error) as error:
                    # It is being written, or the server is not ready: next time.
                    print(f"{source.parts[-4]}: {error}", file=sys.stderr, flush=True)
        time.sleep(EVERY_S)


def is_ready(database: Path) -> bool:
    """Whether the server has made its tables and, as the last row of that, its own experiment."""
    if not database.is_file():
        return False
    try:
        with closing(sqlite3.connect(str(database), timeout=30)) as shown:
            query = "SELECT 1 FROM experiments WHERE experiment_id = 0"
            return shown.execute(query).fetchone() is not None
    except sqlite3.Error:
        return False


def merge(source: Path, database: Path) -> None:
    """Add a run's rows to the database that the server shows. sqlite3.Error if that fails."""
    logs = source.parent.parent.parent
    uri = f"file:{source}?mode=ro"
    run = sqlite3.connect(uri, uri=True, timeout=5)
    with closing(run) as own, closing(sqlite3.connect(str(database), timeout=30)) as shown:
        own.row_factory = sqlite3.Row
        own.execute("PRAGMA trusted_schema = OFF")
        experiments = map_experiments(own, shown)
        for table in TABLES:
            copy_table(own, shown, table, experiments, logs)
        shown.commit()


def list_common_columns(
    own: sqlite3.Connection, shown: sqlite3.Connection, table: str
) -> List[str]:
    """List the columns of a table that both databases have; [] if one lacks the table."""
    query = f"PRAGMA table_info({table})"
    known = {row[1] for row in shown.execute(query)}
    return [row[1] for row in own.execute(query) if row[1] in known]


def map_experiments(own: sqlite3.Connection, shown: sqlite3.Connection) -> Dict[int, int]:
    """Return the number that each experiment of a run has in the common database, by name."""
    columns = list_common_columns(own, shown, "experiments")
    columns.remove("experiment_id")
    marks = ", ".join("?" for _ in columns)
    insert = "INSERT OR IGNORE INTO experiments ({}) VALUES ({})".format(", ".join(columns), marks)
    numbers = {}
    for row in own.execute("SELECT * FROM experiments LIMIT 1000").fetchall():
        shown.execute(insert, [row[column] for column in columns])
        query = "SELECT experiment_id FROM experiments WHERE name = ?"
        numbers[row["experiment_id"]] = shown.execute(query, (row["name"],)).fetchone()[0]
    return numbers


def copy_table(
    own: sqlite3.Connection,
    shown: sqlite3.Connection,
    table: str,
    experiments: Dict[int, int],
    logs: Path,
) -> None:
    """Copy the rows of a table, in the columns that both versions of MLflow have."""
    columns = list_common_columns(own, shown, table)
    if not columns:
        return
    marks = ", ".join("?" for _ in columns)
    names = ", ".join(columns)
    insert = f"INSERT OR REPLACE INTO {table} ({names}) VALUES ({marks})"

    def adapt(column: str, value: object) -> object:
        if column == "experiment_id":
            return experiments.get(value, value) if isinstance(value, int) else value
        if column in PLACES and isinstance(value, str) and BELOW_LOGS in value:
            return (logs / "logs" / "mlflow").as_uri() + "/" + value.split(BELOW_LOGS, 1)[1]
        return value

    rows = own.execute(f"SELECT {names} FROM {table} LIMIT {MOST_ROWS}")
    shown.executemany(insert, ([adapt(c, row[c]) for c in columns] for row in rows))


if __name__ == "__main__":
    main()
