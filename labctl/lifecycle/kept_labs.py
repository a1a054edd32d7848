"""Labs in the care of this machine's keeper: what was handed over, and where it lies.

<keep>/<lab>-<lab id>/            a lab directory: lab.yaml, runs/, .labctl/{lab.json,kept/}
<keep>/<lab>-<lab id>/keep.json   who handed it over, when, which runs (`Ward`)
<keep>/.locks/<lab>-<lab id>      held while somebody works on that lab
<keep>/.rounds.json               what the keeper saw last of each (`Round`)
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from labctl.config import LabConfig, Paths, load_lab
from labctl.errors import BusyError, LabError, NotFoundError
from labctl.events import Reporter
from labctl.model import NAME_PATTERN, Run, Value
from labctl.providers import provider_class
from labctl.servers.context import Ground
from labctl.state import State
from labctl.state.locks import hold_lock

RECORD = "keep.json"
ROUNDS = ".rounds.json"
# Where data lies that is outside the lab at its owner's.
OUTSIDE = Path(".labctl") / "data"
DROP_S = 20.0


class Ward(Value, frozen=True):
    """A lab that was handed over by `by` ("user@host") at `at`, with these `runs` to be recovered.

    `settings` are those that its owner's machine added to lab.yaml, by dotted key. `data` says
    where in the lab directory each data set lies. `ceiling_usd_per_hour` is the most that another
    server may cost where lab.yaml does not say so. `spent_usd` is what the lab had cost by then.
    `files` is what came: path -> (size, sha256).
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
        return ward_name(self.lab, self.lab_id)


class Round(Value, frozen=True):
    """What the last look at a ward found, at Unix second `at`. `error` is "" where all is well."""

    at: float
    state: str
    error: str = ""
    hint: str = ""
    next_at: float = 0.0


def ward_name(lab: str, lab_id: str) -> str:
    """A ward's directory. ValueError for names that are none."""
    if not NAME_PATTERN.fullmatch(lab) or not NAME_PATTERN.fullmatch(lab_id):
        raise ValueError(f"no lab: {lab!a} {lab_id!a}")
    return f"{lab}-{lab_id}"


def wards(places: Paths) -> list[Ward]:
    """Every lab that was handed to this machine, by name."""
    found = sorted(places.keep_dir.glob(f"[!.]*/{RECORD}"))
    return [one for path in found if (one := _read(path)) is not None]


def ward(places: Paths, name: str) -> Ward:
    """The ward of this name, or of this lab where only one has it; NotFoundError."""
    if (one := _read(places.keep_dir / name / RECORD)) is not None:
        return one
    every = wards(places)
    found = [one for one in every if name == one.lab]
    if len(found) == 1:
        return found[0]
    raise NotFoundError(
        f"several labs called {name} are kept here" if found else f"no lab {name} is kept here",
        why=", ".join(one.name for one in found or every),
        hint="labctl keep --list",
    )


def _read(path: Path) -> Ward | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Ward)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise LabError(
            f"{path} cannot be read",
            why=str(error),
            hint=f"rm -r {path.parent}   # forgets the lab",
        ) from error


def directory(places: Paths, name: str) -> Path:
    return places.keep_dir / name


def ground(
    one: Ward,
    places: Paths,
    state: State,
    reporter: Reporter,
    environ: Mapping[str, str],
    *,
    root: Path | None = None,
    record_only: bool = False,
) -> Ground:
    """What flows on a ward stand on. With `record_only` its provider is not loaded."""
    config = _config(one, root or directory(places, one.name), environ, record_only)
    return Ground(
        config,
        one.lab_id,
        places,
        state,
        reporter,
        owner=one.by.partition("@")[0],
        place=f"{socket.gethostname()}-keeper",
    )


def _config(one: Ward, root: Path, environ: Mapping[str, str], record_only: bool) -> LabConfig:
    def loaded(overrides: dict[str, str]) -> LabConfig:
        return load_lab(
            root,
            overrides={**overrides, "lab": one.lab},
            environ=environ,
            settings_type=None if record_only else lambda name: provider_class(name).settings_type,
        )

    # What this machine's owner has set for it counts more than what the laptop had.
    own = loaded({}).beside
    config = loaded({key: text for key, text in one.settings.items() if key not in own})
    need = config.server.need
    if need.max_price_usd_per_hour is None:
        need = msgspec.structs.replace(need, max_price_usd_per_hour=one.ceiling_usd_per_hour)
    data = {
        name: msgspec.structs.replace(source, path=root / one.data[name])
        if source.path is not None and name in one.data
        else source
        for name, source in config.data.items()
    }
    server = msgspec.structs.replace(config.server, need=need)
    return msgspec.structs.replace(config, data=data, server=server)


def known_runs(state: State, one: Ward) -> list[Run]:
    """The ward's runs as last seen; one that nobody has seen yet is left out."""
    return [run for run_id in one.runs if (run := state.run(one.lab_id, run_id)) is not None]


def is_over(run: Run) -> bool:
    """Whether there is nothing left to recover: it ended by itself, or a limit ended it."""
    return run.state in ("exited", "cancelled") or bool(run.stopped_by)


def read_rounds(places: Paths) -> dict[str, Round]:
    """What the keeper saw last of each ward; nothing where it never ran."""
    try:
        content = (places.keep_dir / ROUNDS).read_bytes()
        return msgspec.json.decode(content, type=dict[str, Round])
    except (FileNotFoundError, msgspec.MsgspecError):
        return {}


def write_rounds(places: Paths, seen: Mapping[str, Round]) -> None:
    """For `labctl keep --list`; nothing where no lab was ever handed over."""
    target = places.keep_dir / ROUNDS
    if not target.parent.is_dir():
        return
    draft = target.with_suffix(".new")
    draft.write_bytes(msgspec.json.encode(seen))
    draft.replace(target)


@contextmanager
def worked_on(places: Paths, name: str, what: str, *, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the ward alone; BusyError where somebody else works on it after `wait_s`."""
    with hold_lock(places.keep_dir / ".locks" / name, what, wait_s=wait_s):
        yield


def drop(places: Paths, state: State, name: str) -> Ward:
    """End the keeping of a lab, and remove its directory. What it has at its provider stays.

    BusyError while the keeper works on it: a recovery must not be cut in two.
    """
    one = ward(places, name)
    try:
        with worked_on(places, one.name, "keep --drop", wait_s=DROP_S):
            gone = places.keep_dir / f".dropped-{one.name}"
            shutil.rmtree(gone, ignore_errors=True)
            directory(places, one.name).rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
            _forget(places, state, one)
    except BusyError as error:
        raise BusyError(
            f"{one.lab} is being recovered just now",
            why=error.what,
            hint=f"labctl keep --drop {one.name}   # again, in a few minutes",
        ) from None
    return one


def _forget(places: Paths, state: State, one: Ward) -> None:
    """Records of servers that this machine looks after no more, and the key that opens them."""
    from labctl.servers.connections import Connections

    connections = Connections(places.ssh_dir, None)
    for server in state.servers(one.lab_id):
        connections.close(server)
        connections.forget(server.id)
        state.drop_server(server.id)
    shutil.rmtree(places.keys_dir / one.lab_id, ignore_errors=True)
    (places.config_dir / "secrets" / f"{one.lab_id}.json").unlink(missing_ok=True)
