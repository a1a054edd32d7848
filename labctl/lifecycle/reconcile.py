"""Coming back to a lab that a keeper looked after: what it did becomes known here, once.

Nothing here fails since a keeper cannot be reached: that is said, and what is known here counts.
"""

from __future__ import annotations

from pathlib import Path

from labctl.errors import (
    BusyError,
    ConnectError,
    LabError,
    NotFoundError,
    PolicyError,
    ProviderError,
)
from labctl.events import Note, Step
from labctl.lifecycle import disk_restore
from labctl.lifecycle.keeper_host import KeeperHost
from labctl.lifecycle.recovery_lock import handed_to
from labctl.model import Run
from labctl.runs import outputs, runs
from labctl.runs.saved_copies import from_store, index_of
from labctl.servers import adoption, held_disks, kept_disks
from labctl.servers.context import Ground
from labctl.state import ledgers
from labctl.state.ledgers import BACK
from labctl.sync.pull import PulledRun


def hear(ground: Ground) -> str:
    """Take over what the lab's keeper has written down meanwhile; its host, "" where it has none.

    The provider is not asked: `adopt` does that.
    """
    host = handed_to(ground)
    if not host:
        return ""
    try:
        told = KeeperHost(ground, host).told()
    except NotFoundError:
        _end(ground, host)
        ground.reporter.emit(Note(text=f"{host} keeps {ground.config.name} no longer"))
        return ""
    except LabError as error:
        text = f"the keeper at {host} cannot be asked: {error.what}; this is what is known here"
        ground.reporter.emit(Note(text=text, level="warning"))
        return host
    ledgers.take_over(ground.state, ground.lab_id, told.lines)
    for run in told.runs:
        known = ground.state.run(ground.lab_id, run.id)
        if known is None or known.seen_at < run.seen_at:
            ground.state.save_run(run)
    if told.round is not None and told.round.error:
        text = f"the keeper at {host} says: {told.round.error}"
        ground.reporter.emit(Note(text=text, level="warning"))
    if not told.running:
        text = f"no labctl keep runs at {host} now; next, there: labctl keep --install"
        ground.reporter.emit(Note(text=text, level="warning"))
    return host


def _end(ground: Ground, host: str) -> None:
    ground.state.record(BACK, lab_id=ground.lab_id, detail={"keeper": host})


def come_back(ground: Ground, *, ask: bool = True) -> str:
    """`hear`, and with `ask` the lab's server as its provider knows it now; the keeper's host."""
    host = hear(ground)
    if host and ask:
        try:
            adoption.adopt(ground)
        except (BusyError, ProviderError) as error:
            text = f"{ground.provider.name} cannot be asked: {error.what}"
            ground.reporter.emit(Note(text=text, level="warning"))
    return host


def has_copies(ground: Ground) -> bool:
    """Whether results may lie somewhere besides the server: in a store, or at a keeper."""
    return bool(ground.config.store or handed_to(ground))


def pull(ground: Ground, run_ids: list[str], *, everything: bool) -> list[PulledRun]:
    """Outputs of these runs (of all, if empty) from the server; where it has ended, from the lab's
    store or its keeper. NotFoundError where nobody has them."""
    try:
        server = ground.server()
        held_disks.renew(ground, server)
        if disk_restore.pending(ground, server):
            disk_restore.restore(ground, server)
        return outputs.pull(ground, server, run_ids, everything=everything)
    except (NotFoundError, ConnectError) as error:
        if not has_copies(ground) or (isinstance(error, ConnectError) and _is_there(ground)):
            raise _explained(ground, error) from None
    try:
        return saved_elsewhere(ground, run_ids)
    except NotFoundError as error:
        raise kept_disks.explained(ground, error) from None


def _is_there(ground: Ground) -> bool:
    return adoption.adopt(ground) is not None


def _explained(ground: Ground, error: LabError) -> LabError:
    return kept_disks.explained(ground, error) if isinstance(error, NotFoundError) else error


def saved_elsewhere(ground: Ground, run_ids: list[str]) -> list[PulledRun]:
    """These runs' outputs (all runs', if empty) from the lab's store, or else from its keeper.

    NotFoundError where neither has anything of them.
    """
    known = run_ids or [run.id for run in ground.state.runs(ground.lab_id)]
    found = [one for run_id in known if (one := _elsewhere(ground, run_id)) is not None]
    if not found:
        raise NotFoundError(
            f"nothing of {', '.join(known) or 'any run'} is saved elsewhere",
            why="the server has ended, and there is no store or keeper that has it",
            hint="labctl status --refresh",
        )
    return found


def _elsewhere(ground: Ground, run_id: str) -> PulledRun | None:
    if ground.config.store:
        try:
            return from_store(ground, run_id)
        except NotFoundError:
            pass
    if host := handed_to(ground):
        return copied(ground, KeeperHost(ground, host), run_id)
    return None


def copied(ground: Ground, keeper: KeeperHost, run_id: str) -> PulledRun | None:
    """What the keeper has mirrored of a run, here; None where that is nothing."""
    have = {one.path: one.sha256 for one in index_of(ground.config.root, run_id)}
    pulled = keeper.copy_of(run_id, have, ground.state.run(ground.lab_id, run_id))
    home = ground.config.root / "runs" / run_id
    return pulled if pulled.files or have or any(home.glob("*")) else None


def log_here(ground: Ground, run_id: str) -> Path:
    """Where a pull puts the run's log."""
    return ground.config.root / "runs" / runs.latest(ground, run_id).id / "logs" / "run.log"


def log_elsewhere(ground: Ground, run_id: str) -> bytes:
    """A run's log as it was saved or pulled; NotFoundError where it was not."""
    path = log_here(ground, run_id)
    if has_copies(ground) or not path.is_file():
        saved_elsewhere(ground, [run_id])
    if not path.is_file():
        raise NotFoundError(f"the log of {run_id} was not saved", hint="labctl status")
    return path.read_bytes()


def bring_logs(ground: Ground, run_id: str = "") -> Run:
    """The run (the latest) as it is now, its logs here.

    They come from the server or from where they were saved; where neither can be reached, those
    that are here count, which is said. NotFoundError where there are none.
    """
    come_back(ground)
    run = runs.latest(ground, run_id)
    try:
        _fetch_logs(ground, run)
    except (NotFoundError, BusyError) as error:
        _fetch_logs_elsewhere(ground, run, error)
    return runs.latest(ground, run.id)


def _fetch_logs(ground: Ground, run: Run) -> None:
    server = ground.server()
    if run.server_id != server.id:
        raise NotFoundError(f"the server of run {run.id} is gone", hint=f"labctl pull {run.id}")
    name = f"fetching the logs of {run.id}"
    ground.reporter.emit(Step(name=name))
    outputs.pull(ground, server, [run.id], only=("logs",))
    ground.reporter.emit(Step(name=name, done=True))


def _fetch_logs_elsewhere(ground: Ground, run: Run, error: LabError) -> None:
    """From the store or the keeper, else as they were pulled before."""
    if has_copies(ground):
        try:
            saved_elsewhere(ground, [run.id])
            return
        except NotFoundError:
            pass
    if not log_here(ground, run.id).parent.is_dir():
        raise NotFoundError(
            f"nothing that run {run.id} logged is here", why=error.what, hint=error.hint
        ) from error
    if not run.ended:
        text = f"{error.what}; this is what was pulled before"
        ground.reporter.emit(Note(text=text, level="warning"))


def released(ground: Ground, *, discard: bool) -> None:
    """The keeper looks after the lab no more, once what it alone has is home.

    Before the lab's server ends: a keeper that does not know would replace it. PolicyError where
    it cannot be told; with `discard` that is only said.
    """
    host = handed_to(ground)
    if not host:
        return
    keeper = KeeperHost(ground, host)
    try:
        for run_id in [] if discard else [one.id for one in keeper.told().runs]:
            copied(ground, keeper, run_id)
        keeper.drop()
    except NotFoundError:
        pass
    except LabError as error:
        if not discard:
            raise PolicyError(
                f"the keeper at {host} cannot be told: {error.what}",
                why="it would replace a server that ends, and that would cost money",
                hint="labctl down   # again, once it can be reached; or labctl down --discard",
            ) from error
        text = f"the keeper at {host} was not told ({error.what}) and may make another server"
        hint = f"labctl keep --drop {ground.config.name}"
        ground.reporter.emit(Note(text=f"{text}; next, there: {hint}", level="warning"))
    _end(ground, host)
