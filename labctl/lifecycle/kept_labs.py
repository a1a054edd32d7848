"""The labs that this machine's keeper looks after, and their directories.

<keep>/<lab>-<lab id>/            a lab directory: lab.yaml, runs/, .labctl/{lab.json,kept/}
<keep>/<lab>-<lab id>/keep.json   who exported it, when, which runs (`KeptLab`)
<keep>/.locks/<lab>-<lab id>      held while a process works on that lab
<keep>/.rounds.json               the result of the last check of each (`KeeperCheck`)
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from labctl.config import LabConfig, Paths, load_lab
from labctl.config.member_ids import list_lab_ids
from labctl.decoding import decode_json
from labctl.errors import BusyError, LabError, NotFoundError
from labctl.events import Reporter
from labctl.lazy import lazy_imports
from labctl.model import NAME_PATTERN, Run, Value
from labctl.servers.context import LabContext
from labctl.servers.provider_traits import read_provider_traits
from labctl.state import State
from labctl.state.ledgers import HANDED
from labctl.state.locks import hold_lock

with lazy_imports(__name__):
    from labctl.lifecycle import gang, gang_outcome, gang_runs, recovery_wait
    from labctl.servers import connections as server_connections

RECORD = "keep.json"
CHECKS_FILE = ".rounds.json"
# Where the keeper puts data sets that are outside the lab directory on the owner's machine.
OUTSIDE = Path(".labctl") / "data"
# seconds that `drop` waits for a recovery, which needs some to notice that
DROP_S = 45.0


class KeptLab(Value, frozen=True):
    """A lab that `by` ("user@host") exported at Unix second `at`, with `runs` to recover.

    `settings` are those that its owner's machine added to lab.yaml, by dotted key. `data` maps each
    data set to its path in the lab directory. `ceiling_usd_per_hour` limits the price of another
    server where lab.yaml sets no limit. `spent_usd` is what the lab had cost at the export.
    `files` is what was exported: path -> (size in bytes, sha256).
    """

    lab: str
    lab_id: str
    by: str
    at: float
    runs: tuple[str, ...]
    settings: dict[str, str] = msgspec.field(default_factory=dict)
    data: dict[str, str] = msgspec.field(default_factory=dict)
    ceiling_usd_per_hour: float | None = None
    spent_usd: float = 0.0
    files: dict[str, tuple[int, str]] = msgspec.field(default_factory=dict)

    @property
    def name(self) -> str:
        return kept_lab_name(self.lab, self.lab_id)


class KeeperCheck(Value, frozen=True):
    """The result of a kept lab's last check, at Unix second `at`. `error` is "" if it passed."""

    at: float
    state: str
    error: str = ""
    hint: str = ""
    next_at: float = 0.0


def kept_lab_name(lab: str, lab_id: str) -> str:
    """Return the name of a kept lab's directory. ValueError for an invalid lab name or id."""
    if not NAME_PATTERN.fullmatch(lab) or not NAME_PATTERN.fullmatch(lab_id):
        raise ValueError(f"invalid lab name or id: {lab!a} {lab_id!a}")
    return f"{lab}-{lab_id}"


def list_kept_labs(paths: Paths) -> list[KeptLab]:
    """List the labs that this machine keeps, by name."""
    records = sorted(paths.keep_dir.glob(f"[!.]*/{RECORD}"))
    return [lab for path in records if (lab := _read(path)) is not None]


def find_kept_lab(paths: Paths, name: str) -> KeptLab:
    """Find a kept lab by directory name, or by lab name if that is unique; else NotFoundError."""
    if (lab := _read(paths.keep_dir / name / RECORD)) is not None:
        return lab
    kept = list_kept_labs(paths)
    matches = [lab for lab in kept if name == lab.lab]
    if len(matches) == 1:
        return matches[0]
    raise NotFoundError(
        f"several labs called {name} are kept here" if matches else f"no lab {name} is kept here",
        why=", ".join(lab.name for lab in matches or kept),
        hint="labctl keep --list",
    )


def _read(path: Path) -> KeptLab | None:
    try:
        return decode_json(path.read_bytes(), KeptLab)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise LabError(
            f"{path} cannot be read",
            why=str(error),
            hint=f"rm -r {path.parent}   # forgets the lab",
        ) from error


def lab_directory(paths: Paths, name: str) -> Path:
    return paths.keep_dir / name


def make_context(
    lab: KeptLab,
    paths: Paths,
    state: State,
    reporter: Reporter,
    environ: Mapping[str, str],
    *,
    root: Path | None = None,
    record_only: bool = False,
) -> LabContext:
    """Build the context for flows on a kept lab. With `record_only` its provider is not loaded."""
    config = _config(lab, root or lab_directory(paths, lab.name), environ, record_only)
    return LabContext(
        config,
        lab.lab_id,
        paths,
        state,
        reporter,
        owner=lab.by.partition("@")[0],
        place=f"{socket.gethostname()}-keeper",
        in_process=True,
        is_keeper=True,
    )


def _config(lab: KeptLab, root: Path, environ: Mapping[str, str], record_only: bool) -> LabConfig:
    def loaded(overrides: dict[str, str]) -> LabConfig:
        return load_lab(
            root,
            overrides={**overrides, "lab": lab.lab},
            environ=environ,
            find_provider=None if record_only else read_provider_traits,
        )

    # This machine's own settings override those of the laptop.
    own = loaded({}).beside
    config = loaded({key: text for key, text in lab.settings.items() if key not in own})
    need = config.server.need
    if need.max_price_usd_per_hour is None:
        need = msgspec.structs.replace(need, max_price_usd_per_hour=lab.ceiling_usd_per_hour)
    data = {
        name: msgspec.structs.replace(source, path=root / lab.data[name])
        if source.path is not None and name in lab.data
        else source
        for name, source in config.data.items()
    }
    server = msgspec.structs.replace(config.server, need=need)
    return msgspec.structs.replace(config, data=data, server=server)


def list_recorded_runs(state: State, lab: KeptLab) -> list[Run]:
    """Return the lab's recorded runs; runs without a record are left out."""
    return [run for run_id in lab.runs if (run := state.get_run(lab.lab_id, run_id)) is not None]


def build_members(context: LabContext) -> list[LabContext]:
    """Build a context for each server of a kept lab; that of the lab itself if it has one."""
    return gang.list_every_member(context) if gang.has_several_servers(context) else [context]


def is_over(context: LabContext, run_id: str) -> bool:
    """Whether nothing is left to recover: the run ended by itself, or a limit stopped it."""
    if context.config.server.count > 1 and gang_runs.count_parts(context, run_id) > 1:
        return gang_outcome.is_over(context, run_id)
    run = context.state.get_run(context.lab_id, run_id)
    return run is not None and (run.state in ("exited", "cancelled") or bool(run.stopped_by))


def list_open_runs(context: LabContext, lab: KeptLab) -> list[str]:
    """List the lab's runs that are not over."""
    return [run_id for run_id in lab.runs if not is_over(context, run_id)]


def read_checks(paths: Paths) -> dict[str, KeeperCheck]:
    """Read the last check of each kept lab; empty if the keeper never ran."""
    try:
        content = (paths.keep_dir / CHECKS_FILE).read_bytes()
        return decode_json(content, dict[str, KeeperCheck])
    except (FileNotFoundError, msgspec.MsgspecError):
        return {}


def write_checks(paths: Paths, checks: Mapping[str, KeeperCheck]) -> None:
    """Write the checks for `labctl keep --list`; do nothing if no lab was ever imported."""
    target = paths.keep_dir / CHECKS_FILE
    if not target.parent.is_dir():
        return
    draft = target.with_suffix(".new")
    draft.write_bytes(msgspec.json.encode(checks))
    draft.replace(target)


@contextmanager
def lock_kept_lab(paths: Paths, name: str, what: str, *, wait_s: float = 0.0) -> Iterator[None]:
    """Lock the kept lab; BusyError if another process still holds it after `wait_s` seconds."""
    with hold_lock(paths.keep_dir / ".locks" / name, what, wait_s=wait_s):
        yield


def drop(paths: Paths, state: State, name: str) -> KeptLab:
    """Stop keeping a lab, and delete its directory. Its resources at the provider stay.

    A recovery that waits for a server ends. BusyError while one creates servers or starts a run,
    since that must not be interrupted.
    """
    lab = find_kept_lab(paths, name)
    try:
        with (
            recovery_wait.request_drop(paths, lab.name),
            lock_kept_lab(paths, lab.name, "keep --drop", wait_s=DROP_S),
        ):
            trash = paths.keep_dir / f".dropped-{lab.name}"
            shutil.rmtree(trash, ignore_errors=True)
            lab_directory(paths, lab.name).rename(trash)
            shutil.rmtree(trash, ignore_errors=True)
            _forget(paths, state, lab)
    except BusyError as error:
        activity = recovery_wait.read_activity(paths, lab.name)
        raise BusyError(
            f"{lab.lab} is being recovered right now",
            why=activity.describe() if activity else error.what,
            hint=f"labctl keep --drop {lab.name}   # again, in a few minutes",
        ) from None
    return lab


def _forget(paths: Paths, state: State, lab: KeptLab) -> None:
    """Delete the records of the lab's servers, and the key that logs in to them."""
    if state.list_events(lab_id=lab.lab_id, kind=HANDED, limit=1):
        return  # they are those of its user too, who exported the lab to this account itself
    connections = server_connections.Connections(paths.ssh_dir, None)
    servers = [one for lab_id in list_lab_ids(lab.lab_id) for one in state.list_servers(lab_id)]
    for server in servers:
        connections.close(server)
        connections.forget(server.id)
        state.drop_server(server.id)
    shutil.rmtree(paths.keys_dir / lab.lab_id, ignore_errors=True)
    (paths.config_dir / "secrets" / f"{lab.lab_id}.json").unlink(missing_ok=True)
