"""`labctl serve --model`: a language model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click
import msgspec

from labctl.cli.browser import relative_path
from labctl.cli.exit_codes import clean
from labctl.cli.interrupt import wait_until_interrupted
from labctl.cli.number_range import NumberRange
from labctl.cli.tables import print_json
from labctl.cli.wrapping import print_message
from labctl.config import parse_duration
from labctl.errors import UsageError
from labctl.events import Progress, Step
from labctl.lazy import lazy_imports
from labctl.state.uses import hold_use

if TYPE_CHECKING:
    from labctl.insight.load_test import LoadTest
    from labctl.lab import Lab
    from labctl.services.language_models.endpoint import ModelEndpoint
    from labctl.services.language_models.launch import LaunchChoice

with lazy_imports(__name__):
    from labctl.cli import serve_model_output
    from labctl.insight import load_test, load_test_page
    from labctl.runs import runs
    from labctl.services import model_serving
    from labctl.services.language_models import endpoint as endpoints
    from labctl.services.language_models import engines, launch, serving_plan, source

F = TypeVar("F", bound=Callable[..., Any])
ENGINES = ("auto", "vllm", "llama.cpp", "ollama", "transformers")
FORMATS = "none|awq|gptq|bnb-4bit|int8|gguf:Q4_K_M"
QUESTION = "2+2?"
CLIENTS = 8
LONGEST_TEST_S = 24 * 3600
PAGE = "load-test.html"


class ModelOptions(NamedTuple):
    """The options of --model; 0 and "" mean not given."""

    model: str = ""
    engine: str = ""
    quantize: str = ""
    context: int = 0
    ask: str = ""
    load_test: str = ""
    concurrency: int = 0
    out: str = ""


def _require_name(ctx: click.Context, param: click.Parameter, value: str | None) -> str:
    """Refuse an empty name, as of a variable that is not set: it would serve the latest run."""
    if value is not None and not value.strip():
        raise click.BadParameter("the name of the model is empty", ctx, param)
    return value or ""


def model_options(function: F) -> F:
    """Add the options of --model to the command."""
    for option in reversed(
        (
            click.option(
                "--model",
                callback=_require_name,
                help="Serve this language model: OWNER/NAME or PATH.",
            ),
            click.option(
                "--engine", type=click.Choice(ENGINES), help="Program that serves it (auto)."
            ),
            click.option(
                "--quantize", default="", metavar="FORMAT", help=f"Type of the weights: {FORMATS}."
            ),
            click.option(
                "--context",
                type=NumberRange(8192, min=16, max=100_000_000),
                metavar="N",
                help="Tokens of a conversation (default: what fits).",
            ),
            click.option("--ask", default="", metavar="TEXT", help="Ask this, then exit."),
            click.option(
                "--load-test",
                default="",
                metavar="TIME",
                help="Measure under load this long, such as 1m.",
            ),
            click.option(
                "--concurrency",
                type=NumberRange(CLIENTS, min=1, max=256),
                metavar="N",
                help=f"Clients of --load-test ({CLIENTS}).",
            ),
            click.option(
                "--out",
                default="",
                metavar="FILE",
                help=f"Write the page of --load-test to it (runs/{PAGE}).",
            ),
        )
    ):
        function = option(function)
    return function


def require_model(options: ModelOptions) -> None:
    """UsageError if an option of --model is given without it."""
    for name, value in options._asdict().items():
        if value:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{option} needs --model",
                why="it is about a language model",
                hint="labctl serve --model Qwen/Qwen2.5-1.5B-Instruct",
            )


class RequestedModel(NamedTuple):
    """The command's options that both kinds of models have."""

    env: dict[str, str]
    local_port: int
    loading_s: float
    detach: bool
    json: bool


def serve_model(lab: Lab, options: ModelOptions, served: RequestedModel) -> None:
    """Plan, start and try the model; hold its forward until Ctrl-C, unless it is only tried."""
    test_s = _parse_test(options)
    if served.detach and (options.ask or test_s):
        raise UsageError(
            "--detach cannot be combined with --ask and --load-test",
            why="both end when they are done; the model server continues anyway",
            hint="labctl serve --model MODEL --detach",
        )
    choice = _choose(
        lab, options, served, clients=(options.concurrency or CLIENTS) if test_s else 1
    )
    if not served.json:
        serve_model_output.print_plan(choice.plan)
    server = lab.context.get_server()
    request = launch.request_service(lab.context, server, choice)
    port = served.local_port or request.port
    if served.detach:
        detached = model_serving.forward_detached(lab.context, server, request, port)
        _try(lab, detached.url, choice, options, served, 0.0)
        return
    with (
        hold_use(lab.context.state, lab.id, "forward"),
        model_serving.forward(lab.context, server, request, port) as forward,
    ):
        _try(lab, forward.url, choice, options, served, test_s)
        if options.ask or test_s:
            return
        text = "Press Ctrl-C to close the forward. To stop the model too: labctl serve --stop"
        print_message(text)
        wait_until_interrupted([forward])


def _parse_test(options: ModelOptions) -> float:
    if not options.load_test:
        if options.concurrency or options.out:
            raise UsageError(
                "--concurrency and --out need --load-test",
                hint="labctl serve --model MODEL --load-test 1m --concurrency 8",
            )
        return 0.0
    try:
        seconds = parse_duration(options.load_test)
    except ValueError as error:
        raise UsageError(f"--load-test: {error}", hint="--load-test 1m") from None
    if not 0 < seconds <= LONGEST_TEST_S:
        raise UsageError("--load-test takes from 1s to 24h", hint="--load-test 1m")
    return float(seconds)


def _choose(lab: Lab, options: ModelOptions, served: RequestedModel, clients: int) -> LaunchChoice:
    """Decide how the model is served, and whether it fits; nothing is started."""
    form = serving_plan.parse_quantize(options.quantize or "none")
    context = lab.context
    is_here = Path(options.model).exists()
    token = "" if is_here else runs.read_secrets(context).get(source.HUB_TOKEN, "")
    model = source.find_source(options.model, form, token)
    memory = serving_plan.find_memory(context, context.state.get_lab_server(lab.id))
    chosen = engines.choose_engine(
        options.engine or engines.AUTO,
        form,
        is_gguf=model.is_gguf,
        published=model.shape.quantized,
        has_gpu=memory.gpus > 0,
        is_here=bool(model.path),
    )
    if chosen.engine.image and not model.repository:
        raise UsageError(
            f"{chosen.engine.name} downloads its models from the hub",
            why="labctl sends it no files",
            hint="labctl serve --model OWNER/NAME --engine ollama --quantize gguf:Q4_K_M",
        )
    sequences = clients if chosen.engine.name == "llama.cpp" else 1
    plan = serving_plan.plan_serving(
        model,
        chosen.engine,
        chosen.reason,
        form,
        memory,
        context=options.context,
        sequences=sequences,
    )
    return launch.LaunchChoice(
        source=model,
        engine=chosen.engine,
        plan=plan,
        sequences=sequences,
        threads=int(context.config.limits.cpus),
        env=served.env,
        loading_s=served.loading_s,
    )


def _try(
    lab: Lab,
    url: str,
    choice: LaunchChoice,
    options: ModelOptions,
    served: RequestedModel,
    test_s: float,
) -> None:
    """Ask the smoke test's question twice, run the load test, and print both."""
    model = ""
    if choice.engine.image:
        model = launch.name_ollama_model(choice.source, choice.plan.quantize)
        endpoints.fetch_ollama_model(url, model)
    endpoint = endpoints.ModelEndpoint(url, model, served.loading_s)
    try:
        trial = endpoints.try_model(endpoint, options.ask or QUESTION)
        result = _run_test(lab, endpoint, choice, options, test_s) if test_s else None
    finally:
        endpoint.close()
    page = ""
    if result is not None:
        page = _write_page(lab, result, choice, options, trial.kv_bytes_per_token)
    if served.json:
        report: dict[str, object] = {"url": f"{url.rstrip('/')}/v1", "plan": choice.plan}
        report["trial"] = trial
        if result is not None:
            summary = msgspec.to_builtins(result)
            report["load_test"] = {**summary, "page": page}
        print_json({"serve": report})
        return
    serve_model_output.print_trial(trial, choice.plan)
    if result is not None:
        serve_model_output.print_load_test(result)
        click.echo(clean(f"{relative_path(Path(page))}"))
    if options.ask or test_s:
        serve_model_output.print_continuation(options.model)
    else:
        serve_model_output.print_address(url, endpoint.model, has_chat=endpoint.has_chat)


def _run_test(
    lab: Lab, endpoint: ModelEndpoint, choice: LaunchChoice, options: ModelOptions, test_s: float
) -> LoadTest:
    name, reporter = "load test", lab.context.reporter
    clients = options.concurrency or CLIENTS
    reporter.emit(Step(name=name, detail=f"{clients} clients"))

    def report(elapsed_s: float, requests: int) -> None:
        detail = f"{requests} answers"
        done = min(elapsed_s, test_s)
        reporter.emit(Progress(name=name, done=done, total=test_s, unit="seconds", detail=detail))

    result = load_test.run_load_test(endpoint, choice.engine.name, test_s, clients, report)
    reporter.emit(Step(name=name, done=True))
    return result


def _write_page(
    lab: Lab, result: LoadTest, choice: LaunchChoice, options: ModelOptions, kv: float | None
) -> str:
    plan, context = choice.plan, lab.context
    figures = load_test_page.ServedFigures(
        memory=plan.memory_name,
        context=plan.context,
        weights_bytes=plan.weights_bytes,
        kv_bytes_per_token=plan.kv_bytes_per_token,
        kv_cache_bytes=plan.kv_cache_bytes,
        measured_kv_bytes=kv,
    )
    out = Path(options.out).absolute() if options.out else context.config.root / "runs" / PAGE
    templates = context.paths.data_dir / "templates" / "report"
    load_test_page.write_page(result, figures, context.config.name, templates, out)
    return str(out)
