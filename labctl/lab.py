"""Lab: what a Python user calls, and what the command line stands on.

    lab = Lab.load("lab.yaml")
    with lab.up(Need(gpu=GpuNeed(kind="any", count=1))) as server:
        run = lab.run(["python", "train.py"])
        with lab.forward("tensorboard") as forward:
            print(forward.url)
            run.wait()
        lab.pull(run)

Leaving `with lab.up()` brings results home, verifies them, and removes the server.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from labctl.config import (
    Paths,
    check_files,
    environment,
    lab_id,
    load_lab,
    paths,
    trust,
    trust_questions,
    trusted,
)
from labctl.errors import PolicyError
from labctl.events import Decision, Note, Reporter, Silent
from labctl.model import Need, Run, Server
from labctl.providers import provider_class
from labctl.servers.context import Ground
from labctl.state import State

if TYPE_CHECKING:
    from labctl.insight.explanation import Explanation
    from labctl.insight.run_report import Report
    from labctl.insight.top import ServerNow
    from labctl.lifecycle.down import Ending
    from labctl.lifecycle.forget import Lost
    from labctl.runs.probe import Probed
    from labctl.services.forwards import Forwarding
    from labctl.submissions.submit import Choice, HandedIn
    from labctl.sync.lab_files import Pushed
    from labctl.sync.pull import PulledRun


# The id that stands for no lab: nothing bears it.
NO_LAB = "none"


class Lab:
    """One lab: a directory with a lab.yaml. Making it touches no network."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.config = ground.config
        self.id = ground.lab_id

    @classmethod
    def load(
        cls,
        path: str | Path = ".",
        *,
        overrides: Mapping[str, str] | None = None,
        reporter: Reporter | None = None,
        environ: Mapping[str, str] | None = None,
        record_only: bool = False,
        needs_file: bool = True,
        everywhere: bool = False,
    ) -> Lab:
        """The lab of a directory or a lab.yaml. ConfigError lists everything wrong in it.

        With `record_only` the providers' own sections stay unread and no provider is loaded: enough
        for a `status` that asks nobody, and for nothing else. Without `needs_file` a directory that
        is no lab stands for none: what asks the provider about everything works there.
        `everywhere` asks in every region.
        """
        around = environment() if environ is None else environ
        places: Paths = paths(around)
        config = load_lab(
            Path(path),
            overrides=overrides,
            environ=around,
            settings_type=None if record_only else lambda name: provider_class(name).settings_type,
            needs_file=needs_file,
        )
        state = State(places.database)
        told = reporter or Silent()
        if state.was_rebuilt:
            text = f"labctl's record on this machine was begun anew: {state.was_rebuilt}"
            told.emit(Note(text=f"{text}; labctl status --refresh", level="warning"))
        own_id = lab_id(config.root) if config.path.exists() else NO_LAB
        ground = Ground(config, own_id, places, state, told, everywhere)
        return cls(ground)

    def up(self, need: Need | None = None) -> LabServer:
        """A ready server: the lab's own, or a new one. `need` goes over lab.yaml's."""
        from labctl.lifecycle.up import up

        self._settle_trust()
        check_files(self.config)
        if need is not None:
            server_config = msgspec.structs.replace(self.config.server, need=need)
            self.config = msgspec.structs.replace(self.config, server=server_config)
            self.ground = dataclasses.replace(self.ground, config=self.config)
        return LabServer(self, up(self.ground))

    def push(self, *, force: bool = False) -> list[Pushed]:
        """Code and data to the server; what was edited there stops it (PolicyError)."""
        from labctl.sync.lab_files import push

        check_files(self.config)
        return push(self.ground, self.ground.server(), force=force)

    def run(
        self,
        command: Sequence[str] = (),
        *,
        id: str = "",
        follow: bool = False,
        tty: bool = False,
        push: bool = True,
        recover: bool = False,
        keeper: str = "",
        on_start: Callable[[Run, bool], None] = lambda run, found: None,
        on_log: Callable[[bytes], None] = lambda block: None,
    ) -> LabRun:
        """Push, then start `command` (lab.yaml's `run:` if empty), exactly once for one `id`.

        With `recover` it goes on, on another server, where its server ends before it does; that is
        seen to while somebody follows it, or by the `keeper` ("host" or "user@host:port") that the
        lab is handed over to.
        """
        from labctl.lifecycle import restore, spending_policy
        from labctl.runs import runs
        from labctl.servers.adoption import renew

        self._settle_trust()
        check_files(self.config)
        if recover and (follow or keeper) and id and self._to_go_on(id):
            self._handed_over(keeper, id)
            if follow:
                return self._followed(id, on_log)
            return LabRun(self, runs.latest(self.ground, id))
        server = self.ground.server()
        if keeper:
            from labctl.lifecycle import export_lab, keeper_host

            export_lab.check(self.ground, keeper_host.KeeperHost(self.ground, keeper), server)
        renew(self.ground, server)
        wanted = runs.spec(self.ground, server, tuple(command), id or runs.new_id(), tty)
        if push:
            self.push()
        if recover:
            restore.keep_code(self.ground, wanted)
        found = runs.start(
            self.ground,
            server,
            wanted,
            follow=follow and not recover,
            on_start=on_start,
            on_log=on_log,
        )
        if recover:
            spending_policy.agree(self.ground, server, found.id)
        self._handed_over(keeper, found.id)
        if recover and follow:
            return self._followed(found.id, on_log)
        return LabRun(self, found)

    def _to_go_on(self, run_id: str) -> bool:
        from labctl.lifecycle.recover import unfinished

        return unfinished(self.ground, run_id)

    def _handed_over(self, keeper: str, run_id: str) -> None:
        if keeper:
            from labctl.lifecycle.export_lab import hand_over
            from labctl.lifecycle.keeper_host import KeeperHost

            there = KeeperHost(self.ground, keeper)
            hand_over(self.ground, there, self.ground.server(), run_id)

    def _followed(self, run_id: str, on_log: Callable[[bytes], None]) -> LabRun:
        from labctl.lifecycle.recover import follow

        return LabRun(self, follow(self.ground, run_id, on_log=on_log))

    def pull(
        self, run: LabRun | str | None = None, *, everything: bool = False, all_runs: bool = False
    ) -> list[PulledRun]:
        """Outputs of a run (the latest), verified; with `everything` new files elsewhere too.

        Where the server has ended, they come from the lab's store, or from its keeper's copy.
        """
        from labctl.lifecycle import reconcile
        from labctl.runs import runs

        if reconcile.has_copies(self.ground):
            self._settle_trust()
        reconcile.come_back(self.ground)
        wanted = run.id if isinstance(run, LabRun) else (run or "")
        ids = [] if all_runs else [runs.latest(self.ground, wanted).id]
        return reconcile.pull(self.ground, ids, everything=everything)

    def forward(self, service: str, *, port: int = 0) -> Forwarding:
        """A local port to a service, started on the server if need be; a context manager."""
        from labctl.services.lab_services import forward

        return forward(self.ground, self.ground.server(), service, port)

    def serve(self, run: str = "", *, checkpoint: str = "", port: int = 0) -> Forwarding:
        """The run's model (the latest's) behind POST /predict at a local port; as `forward`."""
        from labctl.services import model_serving

        server = self.ground.server()
        choice = model_serving.Choice(run=run, checkpoint=checkpoint)
        return model_serving.forward(
            self.ground, server, model_serving.of_model(self.ground, server, choice), port
        )

    def down(self, *, discard: bool = False) -> Ending:
        """Bring home what is not here, remove the server, say what is left."""
        from labctl.lifecycle.down import down

        return down(self.ground, discard=discard)

    def forget(self) -> Lost:
        """Drop the records of what these credentials do not show; nothing is ended."""
        from labctl.lifecycle.forget import forget

        return forget(self.ground)

    def status(self, *, refresh: bool = False, why: bool = False) -> dict[str, Any]:
        """What is recorded of the lab; with `refresh` what the provider and the server say now."""
        from labctl.lifecycle.status import status

        return status(self.ground, refresh=refresh, why=why)

    def probe(
        self,
        command: Sequence[str] = (),
        *,
        amount: str = "1%",
        push: bool = True,
        on_start: Callable[[Run], None] = lambda run: None,
    ) -> Probed:
        """A short run of `command` first: what the whole one will take. `amount`: `1%`, `200`."""
        from labctl.runs import probe

        wanted = probe.amount(amount)
        self._settle_trust()
        check_files(self.config)
        return probe.probe(self.ground, tuple(command), wanted, push=push, on_start=on_start)

    def top(self) -> ServerNow:
        """What the server, its GPUs and everybody's runs on it do at this moment."""
        from labctl.insight.top import look

        return look(self.ground)

    def explain(self, run: str = "") -> Explanation:
        """Why a run (the latest) is slow or wrong: evidence, source, and what to try next."""
        from labctl.insight.explanation import explain
        from labctl.lifecycle.reconcile import bring_logs

        return explain(self.ground, bring_logs(self.ground, run))

    def report(self, run: str = "", out: Path | None = None) -> Report:
        """Write the results of a run (the latest) as one HTML file; see docs/report.md."""
        from labctl import __version__
        from labctl.insight.run_report import report

        return report(self.ground, run, out, version=__version__)

    def submit(self, choice: Choice | None = None) -> HandedIn:
        """Hand in a run (the latest) for the lab's assignment; see docs/submit.md."""
        from labctl.submissions import submit

        return submit.submit(self.ground, choice or submit.Choice())

    @property
    def keeper(self) -> str:
        """The host whose keeper looks after the lab; "" where none does."""
        if not self.ground.state.events(lab_id=self.id, kind="handed", limit=1):
            return ""
        from labctl.lifecycle.recovery_lock import handed_to

        return handed_to(self.ground)

    def _settle_trust(self) -> None:
        questions = trust_questions(self.config)
        if trusted(self.ground.paths, self.config):
            return
        detail = "\n".join(f"  - {question}" for question in questions)
        said = Decision(
            question="approve this lab.yaml?", detail=f"{self.config.path} would:\n{detail}"
        )
        if not self.ground.reporter.ask(said):
            raise PolicyError(
                f"{self.config.path} was not approved",
                why="it asks for things that are yours; read it first",
                hint="labctl trust",
            )
        trust(self.ground.paths, self.config)


class LabServer:
    """A lab's ready server as a context: leaving it brings results home and removes it."""

    def __init__(self, lab: Lab, server: Server) -> None:
        self.lab = lab
        self.server = server

    @property
    def alias(self) -> str:
        """Its name for ssh: `ssh <alias>` works."""
        return self.server.alias

    def __enter__(self) -> LabServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.lab.down()


class LabRun:
    """A run as last seen; `wait` and `refresh` ask the server."""

    def __init__(self, lab: Lab, run: Run) -> None:
        self.lab = lab
        self.seen = run

    @property
    def id(self) -> str:
        return self.seen.id

    @property
    def exit_code(self) -> int | None:
        return self.seen.exit_code

    def wait(self, on_log: Callable[[bytes], None] = lambda block: None) -> Run:
        """Follow the run to its end, through cut links; returns it with its exit code."""
        from labctl.runs.runs import watch

        self.seen = watch(self.lab.ground, self.lab.ground.server(), self.id, on_log=on_log)
        return self.seen
