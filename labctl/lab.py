"""The class Lab: the Python interface, on which the command line is built.

    lab = Lab.load("lab.yaml")
    with lab.up(Need(gpu=GpuNeed(kind="any", count=1))) as server:
        run = lab.run(["python", "train.py"])
        with lab.forward("tensorboard") as forward:
            print(forward.url)
            run.wait()
        lab.pull(run)

Leaving `with lab.up()` downloads the results, verifies them, and removes the server.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from labctl import __version__
from labctl.config import (
    Paths,
    check_files,
    copy_environment,
    ensure_lab_id,
    find_lab,
    find_paths,
    format_trust_command,
    is_trusted,
    list_trust_questions,
    load_lab,
    trust,
)
from labctl.errors import ConfigError, PolicyError
from labctl.events import Note, Question, Reporter, SharedReporter, SilentReporter
from labctl.lazy import lazy_imports
from labctl.model import Need, Run, Server
from labctl.providers import is_installed
from labctl.servers import provider_choice
from labctl.servers.context import LabContext
from labctl.servers.provider_traits import check_settings, read_provider_traits
from labctl.state import State
from labctl.wire.run_ids import BANDWIDTH_PREFIX

if TYPE_CHECKING:
    from labctl.insight.bandwidth import Bandwidth
    from labctl.insight.compare.comparison import ComparisonResult
    from labctl.insight.explanation import Explanation
    from labctl.insight.report.document import DocumentForm, Report
    from labctl.insight.top import ServerMetrics
    from labctl.lifecycle.down import DownResult
    from labctl.lifecycle.fleet import LabOutcome
    from labctl.lifecycle.forget import UnconfirmedRecords
    from labctl.lifecycle.lab_status import LabStatus
    from labctl.lifecycle.move import MoveResult
    from labctl.lifecycle.move_end import CanceledMove
    from labctl.lifecycle.stop import StopResult
    from labctl.lifecycle.sweeps.plan import SweepOptions
    from labctl.lifecycle.sweeps.sweep import SweepResult
    from labctl.runs.probe import ProbeResult
    from labctl.services.port_forward import Forwarding
    from labctl.submissions.submit import SubmissionChoice, SubmitResult
    from labctl.sync.pull import PulledRun
    from labctl.sync.push import PushedTree
    from labctl.wire.runs import RunSpec

with lazy_imports(__name__):
    from labctl.insight import bandwidth, comparison_report, explanation, run_report, top
    from labctl.lifecycle import (
        down,
        export_lab,
        fleet,
        follow,
        forget,
        gang,
        gang_follow,
        gang_keeper,
        gang_probe,
        gang_push,
        gang_runs,
        keeper_host,
        move,
        move_end,
        reconcile,
        recovery_lock,
        restore,
        run_start,
        spending_policy,
        status,
        stop,
        up,
    )
    from labctl.lifecycle.sweeps import plan, study, sweep
    from labctl.runs import (
        command_mistakes,
        first_run,
        probe,
        run_specs,
        runs,
    )
    from labctl.servers import adoption, chosen_need, recorded_config
    from labctl.services import lab_services, model_serving
    from labctl.state import ledgers
    from labctl.submissions import bundling, freshness, submit
    from labctl.sync import lab_files, transfer_lock


# lab id outside of any lab; no server or run has it
NO_LAB = "none"


class Lab:
    """A lab: a directory with a lab.yaml. Creating the object uses no network."""

    def __init__(self, context: LabContext) -> None:
        self.context = context
        self.config = context.config
        self.id = context.lab_id
        self._warnings: set[str] = set()

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
        in_process: bool = True,
        skips_faults: bool = False,
    ) -> Lab:
        """Load the lab of a directory or a lab.yaml. ConfigError lists all problems in the file.

        The lab of a directory without lab.yaml is that of the nearest directory above with one.

        With `record_only`, the providers' sections are not read and no provider is loaded; this is
        enough for `status` without refresh, and for nothing else. Without `needs_file`, the
        directory need not be a lab; commands that list everything at the provider work there.
        `everywhere` searches every region. `in_process` keeps one connection to the server inside
        this process; without it each command uses the user's ssh, whose connection outlives it.
        With `skips_faults`, mistakes in lab.yaml are a warning, and the record replaces what they
        hide; this is enough for commands that end, list or inspect what the lab has.
        """
        variables = copy_environment() if environ is None else environ
        user_paths: Paths = find_paths(variables)
        load = functools.partial(
            load_lab,
            find_lab(Path(path)),
            environ=variables,
            find_provider=None if record_only else read_provider_traits,
            needs_file=needs_file,
        )
        fault: ConfigError | None = None
        try:
            config = load(overrides=overrides)
            if record_only and skips_faults and not is_installed(config.server.provider):
                # no provider was looked up; this raises the error that names the wrong one
                config = load(overrides=overrides, find_provider=read_provider_traits)
        except ConfigError as error:
            if not skips_faults:
                raise
            fault = error
            config = load(overrides=overrides, skips_faults=True)
        state = State(user_paths.database)
        lab_reporter = SharedReporter(reporter or SilentReporter())
        if state.was_rebuilt:
            text = f"labctl's record on this machine was rebuilt: {state.was_rebuilt}"
            lab_reporter.emit(Note(text=f"{text}; labctl status --refresh", level="warning"))
        own_id = ensure_lab_id(config.root) if config.path.exists() else NO_LAB
        if fault is not None:
            config = recorded_config.load_recorded(
                load, fault, overrides or {}, state, own_id, needs_provider=not record_only
            )
            text = recorded_config.describe_faults(fault)
            lab_reporter.emit(Note(text=text, level="warning"))
        elif not record_only and (choice := provider_choice.find_choice(state, own_id, config)):
            config = load(overrides={**(overrides or {}), "provider": choice.provider})
            config = provider_choice.apply_choice(config, choice)
        context = LabContext(
            config, own_id, user_paths, state, lab_reporter, everywhere, in_process=in_process
        )
        return cls(context)

    def up(self, need: Need | None = None) -> LabServer:
        """Return the lab's server, and start one if it has none. `need` overrides lab.yaml."""
        # before a question whose answer would be lost
        adoption.require_recorded_provider(
            provider_choice.use_recorded_provider(self.context, by_rule=True)
        )
        if not is_trusted(self.context.paths, self.config):
            # Report missing credentials before the question about the file.
            self.context.provider.get_account()
        self.require_approval()
        check_files(self.config)
        if need is not None:
            self.config = chosen_need.choose_need(self.config, need)
            self.context = msgspec.structs.replace(self.context, config=self.config)
        return LabServer(self, up.up(self.context))

    def select_server(self, rank: int) -> Lab:
        """Return this lab with one of its servers alone; 0 is the first. UsageError without it."""
        return Lab(gang.select_server(self.context, rank))

    def select_run_server(self, run: str) -> Lab:
        """Return this lab with the server alone that has a run, if it is not on the first one."""
        return Lab(gang.select_run_server(self.context, run))

    def check_run(
        self,
        command: Sequence[str] = (),
        *,
        id: str = "",
        recover: bool = False,
        keeper: str = "",
    ) -> None:
        """Raise the errors of `run` that this machine can find, before a server costs money."""
        runs.require_secrets(self.context)  # before a question whose answer would be lost
        self.require_approval()
        check_files(self.config)
        choice = run_start.RunChoice(tuple(command), id=id, recover=recover, keeper=keeper)
        run_start.check_run(self.context, choice)
        self._warn_of_command(command, push=True)

    def push(self, *, force: bool = False) -> list[PushedTree]:
        """Send code and data to the server, or to all of several.

        PolicyError if files were edited on the server, unless `force` is set.
        """
        check_files(self.config)
        if gang.has_several_servers(self.context):
            return gang_push.push_to_all(self.context, force=force)
        return lab_files.push(self.context, self.context.get_server(), force=force)

    def run(
        self,
        command: Sequence[str] = (),
        *,
        id: str = "",
        follow: bool = False,
        tty: bool = False,
        held: bool = False,
        push: bool = True,
        recover: bool = False,
        keeper: str = "",
        gpus: int = 0,
        on_start: Callable[[Run, bool], None] = lambda run, found: None,
        on_log: Callable[[bytes], None] = lambda block: None,
    ) -> LabRun:
        """Push, then start `command` (lab.yaml's `run:` if empty), exactly once for each `id`.

        With `recover`, the run resumes on a new server if its server ends first. This works while
        this process follows the run, or through the `keeper` ("host" or "user@host:port") that the
        lab is handed over to. With `held`, the run's container is created and waits for the caller
        to start it, so that a terminal can attach first: `docker start --attach --interactive`.
        With `gpus`, torchrun starts the program on that many GPUs of the server.
        """
        runs.require_secrets(self.context)
        self.require_approval()
        check_files(self.config)
        choice = run_start.RunChoice(
            command=tuple(command),
            id=id,
            follow=follow,
            tty=tty,
            held=held,
            push=push,
            recover=recover,
            keeper=keeper,
            gpus=gpus,
        )
        listener = run_start.RunListener(on_start, on_log, self._warn)
        if gang.has_several_servers(self.context):
            return LabRun(self, run_start.start_on_several(self.context, choice, listener))
        if keeper:
            gang_keeper.require_enough_servers(self.context, id)
        if run_start.is_continued(self.context, choice):
            return LabRun(self, run_start.continue_run(self.context, choice, listener))
        return LabRun(self, self._start_run(choice, listener))

    def _start_run(self, choice: run_start.RunChoice, listener: run_start.RunListener) -> Run:
        """Push and start the run on the lab's server, and follow it if asked."""
        run_id = choice.id or run_specs.make_run_id()
        if choice.recover and choice.id:
            runs.require_known_without_server(self.context, choice.id)
        # A mistake in the command is reported before a missing server.
        run_specs.require_valid(self.context, choice.command, run_id)
        server = self.context.get_server()
        if choice.keeper:
            host = keeper_host.KeeperHost(self.context, choice.keeper)
            export_lab.check_export(self.context, host)
        adoption.renew(self.context, server)
        spec = run_specs.build_spec(
            self.context, server, choice.command, run_id, choice.tty, choice.gpus
        )
        self._warn_of_command(choice.command, push=choice.push)
        if choice.push:
            self._push_for_run(server, spec)
        if choice.recover:
            restore.keep_code(self.context, spec)
        run = runs.start(
            self.context,
            server,
            spec,
            follow=choice.follow and not choice.recover,
            held=choice.held,
            on_start=listener.on_start,
            on_log=listener.on_log,
        )
        if choice.recover:
            spending_policy.record_price_limit(self.context, server, run.id)
        run_start.hand_over(self.context, choice.keeper, run.id)
        if choice.recover and choice.follow:
            return follow.follow(self.context, run.id, on_log=listener.on_log)
        return run

    def _push_for_run(self, server: Server, spec: RunSpec) -> None:
        """Push code and data; before the first run of an image, side by side with the image."""
        with transfer_lock.name_command("run"):
            if first_run.has_run_on_server(self.context, server, spec.image):
                lab_files.push(self.context, server, force=False)
            else:
                first_run.push_with_image(self.context, server, spec.image)

    def pull(
        self, run: LabRun | str | None = None, *, everything: bool = False, all_runs: bool = False
    ) -> list[PulledRun]:
        """Download and verify the outputs of a run (default: the latest run).

        With `everything`, also new files outside `outputs`; with `all_runs`, every run. If the
        server has ended, the files come from the lab's store or from its keeper's copy.
        """
        if reconcile.has_copies(self.context):
            self.require_approval()
        reconcile.reconcile(self.context)
        run_id = run.id if isinstance(run, LabRun) else (run or "")
        context = gang.select_run_server(self.context, run_id)
        ids = [] if all_runs else [runs.find_run(context, run_id).id]
        return reconcile.pull(context, ids, everything=everything)

    def forward(self, service: str, *, port: int = 0) -> Forwarding:
        """Open a local port to a service, and start the service if needed; a context manager."""
        return lab_services.forward(self.context, self.context.get_server(), service, port)

    def serve(self, run: str = "", *, checkpoint: str = "", port: int = 0) -> Forwarding:
        """Serve the model of a run (default: the latest) as POST /predict on a local port.

        The result is a context manager, like that of `forward`.
        """
        server = self.context.get_server()
        choice = model_serving.ServeChoice(run=run, checkpoint=checkpoint)
        return model_serving.forward(
            self.context, server, model_serving.request_model(self.context, server, choice), port
        )

    def down(self, *, discard: bool = False) -> DownResult:
        """Download what is not here yet, remove the server, and return what is left.

        With `discard`, nothing is downloaded.
        """
        return down.down(self.context, discard=discard)

    def move(self, need: Need | None = None, *, provider: str = "") -> MoveResult:
        """Move the lab to a server for `need`, or at `provider`, and remove the old one then.

        Results come to this machine, and active runs resume on the new server from their last
        checkpoint. Without arguments, this continues an interrupted move.
        """
        if provider:  # whose section of lab.yaml may need approval
            Lab(provider_choice.select_alone(self.context, provider)).require_approval()
        self.require_approval()
        check_files(self.config)
        return move.move(self.context, need, provider)

    def cancel_move(self) -> CanceledMove:
        """Remove the new server of an unfinished move; the lab stays on its old one."""
        return move_end.cancel(self.context)

    def stop(self) -> StopResult:
        """Cancel the server's runs and stop it. Its disk is kept, and may cost money.

        PolicyError if its provider cannot stop servers.
        """
        return stop.stop(self.context)

    def start(self) -> LabServer:
        """Start the lab's stopped server and wait until it is ready; never creates a server."""
        self.require_approval()
        check_files(self.config)
        return LabServer(self, stop.start(self.context))

    def forget(self) -> UnconfirmedRecords:
        """Drop the records of servers that these credentials do not show; terminate nothing."""
        return forget.forget(self.context)

    def status(self, *, refresh: bool = False, why: bool = False) -> LabStatus:
        """Return the lab's record; with `refresh`, query the provider and the server first."""
        return status.read_status(self.context, refresh=refresh, why=why)

    def probe(
        self,
        command: Sequence[str] = (),
        *,
        amount: str = "1%",
        push: bool = True,
        on_start: Callable[[Run], None] = lambda run: None,
    ) -> ProbeResult:
        """Run `command` for a share (`1%`) or a number of steps (`200`) and estimate the whole."""
        parsed_amount = probe.parse_amount(amount)
        self.require_approval()
        check_files(self.config)
        self._warn_of_command(command, push=push)
        kind = gang_probe if gang.has_several_servers(self.context) else probe
        job = kind.build_job(self.context, tuple(command), push=push, on_start=on_start)
        return probe.probe(self.context, job, parsed_amount)

    def sweep(self, options: SweepOptions | None = None, *, starts: bool = False) -> SweepResult:
        """Try parameters of a command, each trial a run, or continue to; see docs/sweeps.md.

        With `starts`, servers that the lab lacks are started first, and those that are lost
        replaced.
        """
        options = options or plan.SweepOptions()
        sweep_plan = plan.build_plan(self.config, options)
        study.require_optuna()
        self.require_approval()
        check_files(self.config)
        self._warn_of_command(sweep_plan.command, push=True)
        return sweep.run_sweep(
            self.context, sweep_plan, options, starts=starts, version=__version__
        )

    def measure_bandwidth(self) -> Bandwidth:
        """Measure how fast the GPUs, or the servers, of the lab exchange data, by a short run."""
        gpus = len(self.context.load_facts(self.context.get_server()).gpus)
        command = bandwidth.build_command(self.config, gpus)
        log = bytearray()
        run_id = BANDWIDTH_PREFIX + run_specs.make_run_id()
        run = self.run(command, id=run_id, follow=True, on_log=log.extend)
        return bandwidth.parse_result(bytes(log), run.last_known)

    def top(self) -> ServerMetrics:
        """Return one sample of the server: GPUs, CPU, memory, and the runs of all its users."""
        return top.measure_now(self.context)

    def top_all(self) -> list[LabOutcome[ServerMetrics]]:
        """Return one sample of each server of the lab, or the error of one that does not answer."""
        return fleet.run_for_each(gang.build_members(self.context), top.measure_now)

    def explain(self, run: str = "") -> Explanation:
        """Explain why a run (default: the latest) is slow or wrong, with evidence and advice."""
        return explanation.explain(self.context, reconcile.fetch_logs(self.context, run))

    def report(
        self, run: str = "", out: Path | None = None, form: DocumentForm | None = None
    ) -> Report:
        """Write the results of a run (default: the latest) as a page or slides; docs/report.md."""
        return run_report.write_report(self.context, run, out, form=form, version=__version__)

    def compare(self, runs: Sequence[str]) -> ComparisonResult:
        """Compare pulled runs: results, settings, cost, significance; see docs/tracking.md."""
        return comparison_report.compare(self.context, runs)

    def report_comparison(
        self, runs: Sequence[str], out: Path | None = None, form: DocumentForm | None = None
    ) -> Report:
        """Write a comparison of runs as a page or slides."""
        write = comparison_report.write_comparison
        return write(self.context, runs, out, form=form, version=__version__)

    def submit(
        self, choice: SubmissionChoice | None = None, *, fresh: bool = False
    ) -> SubmitResult:
        """Submit a run (default: the latest) for the lab's assignment; see docs/submit.md.

        With `fresh`, download, evaluate and report the run anew first.
        """
        choice = choice or submit.SubmissionChoice()
        if fresh:
            self.refresh_results(choice)
        return submit.submit(self.context, choice)

    def refresh_results(self, choice: SubmissionChoice) -> None:
        """Download, evaluate and report the run that would be submitted."""
        rules = submit.find_assignment(self.config.root, choice.assignment)
        run = freshness.inspect_run(self.context, bundling.find_run(self.context, choice.run)).run
        if not freshness.has_final_files(run, self.config.root / "runs" / run.id):
            self.pull(run.id)
        freshness.renew_evaluation(self.context, rules, run.id, choice.checkpoint)
        self.report(run.id)

    @property
    def keeper(self) -> str:
        """The host whose keeper watches over the lab, or "" without one."""
        if not self.context.state.list_events(lab_id=self.id, kind=ledgers.HANDED, limit=1):
            return ""
        return recovery_lock.find_keeper(self.context)

    @property
    def can_join_server(self) -> bool:
        """Whether the provider may have a server that another device or lab of the user started."""
        return adoption.can_join(self.config.server.provider)

    def require_approval(self) -> None:
        """Ask the user to approve this lab.yaml, unless that was done. PolicyError after a no."""
        questions = list_trust_questions(self.config)
        if is_trusted(self.context.paths, self.config):
            return
        # before a question whose answer would be lost
        check_settings(self.context.provider)
        detail = "\n".join(f"  - {question}" for question in questions)
        decision = Question(
            question="approve this lab.yaml?", detail=f"{self.config.path} would:\n{detail}"
        )
        if not self.context.reporter.confirm(decision):
            command = format_trust_command(self.config)
            raise PolicyError(
                f"{self.config.path} was not approved",
                why="it uses your secrets, files or money; read it first",
                hint=f"{command}   # shows what it would do, and asks",
            )
        trust(self.context.paths, self.config)

    def _warn_of_command(self, command: Sequence[str], *, push: bool) -> None:
        for text in command_mistakes.list_mistakes(self.config, tuple(command), push=push):
            self._warn(text)

    def _warn(self, text: str) -> None:
        """Warn once, though `check_run` and `run` find the same mistakes."""
        if text not in self._warnings:
            self._warnings.add(text)
            self.context.reporter.emit(Note(text=text, level="warning"))


class LabServer:
    """A lab's server as a context manager: leaving it downloads the results and removes it."""

    def __init__(self, lab: Lab, server: Server) -> None:
        self.lab = lab
        self.server = server

    @property
    def alias(self) -> str:
        """Its name in the SSH configuration: `ssh <alias>` works."""
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
    """A run. `last_known` is what was last read of it; `wait` reads it from the server again."""

    def __init__(self, lab: Lab, run: Run) -> None:
        self.lab = lab
        self.last_known = run

    @property
    def id(self) -> str:
        return self.last_known.id

    @property
    def exit_code(self) -> int | None:
        return self.last_known.exit_code

    def wait(self, on_log: Callable[[bytes], None] = lambda block: None) -> Run:
        """Follow the run to its end, reconnecting if needed, and return it with its exit code."""
        context = self.lab.context
        if gang_runs.count_parts(context, self.id) > 1:
            self.last_known = gang_follow.follow_log(context, self.id, on_log=on_log)
            return self.last_known
        self.last_known = runs.watch(context, context.get_server(), self.id, on_log=on_log)
        return self.last_known
