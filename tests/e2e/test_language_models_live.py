"""Two real engines serve the same weights: equal greedy answers, and a cache as estimated."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests
import tiny_llama

from labctl.retry import poll_until
from labctl.services.language_models.endpoint import ModelEndpoint, ModelPrompt, try_model
from labctl.services.language_models.engines import choose_engine
from labctl.services.language_models.launch import (
    ENGINE_PORT,
    PORT,
    LaunchChoice,
    build_command,
)
from labctl.services.language_models.serving_plan import ServingMemory, plan_serving
from labctl.services.language_models.source import find_source
from labctl.services.port_forward import find_free_port

pytestmark = pytest.mark.long
PROGRAMS = Path(sys.executable).parent


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    for package in ("transformers", "gguf", "xllamacpp", "fastapi"):
        pytest.importorskip(package, exc_type=ImportError)
    return tiny_llama.write(tmp_path_factory.mktemp("models"))


@contextmanager
def served(model: Path) -> Iterator[tuple[ModelEndpoint, int]]:
    """The engine that labctl chooses, with the command that it builds, and the estimated cache."""
    source = find_source(str(model), "none", "")
    chosen = choose_engine(
        "auto", "none", is_gguf=source.is_gguf, published=source.shape.quantized, has_gpu=False
    )
    plan = plan_serving(
        source, chosen.engine, chosen.reason, "none", ServingMemory(4 << 30, "memory")
    )
    choice = LaunchChoice(source=source, engine=chosen.engine, plan=plan, threads=1)
    port = find_free_port(0)
    directory = str(model.parent if source.is_gguf else model)
    words = [word.replace("/lab/model", directory) for word in build_command(choice)]
    ports = {str(PORT): str(port), str(ENGINE_PORT): str(find_free_port(0))}
    words = [ports.get(word, word) for word in words]
    inner = ports[str(ENGINE_PORT)]
    words = [word.replace(f'"port": {ENGINE_PORT}', f'"port": {inner}') for word in words]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environ["PATH"] = f"{PROGRAMS}:{environ['PATH']}"
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert process.poll() is None
        try:
            return requests.get(f"{url}/v1/models", timeout=5).status_code == 200
        except requests.RequestException:
            return False

    process = subprocess.Popen(words, env=environ, stdout=subprocess.DEVNULL)
    try:
        assert poll_until(answers, pause_s=0.5, deadline_s=300)
        yield ModelEndpoint(url), plan.kv_bytes_per_token
    finally:
        process.terminate()
        process.wait()


def test_two_engines_give_the_same_greedy_answer(models: tuple[Path, Path]) -> None:
    directory, file = models
    answers = []
    for model in (file, directory):
        with served(model) as (endpoint, estimated):
            # The same text for both, without a template that each reads in its own way.
            endpoint.has_chat = False
            foreign = requests.get(endpoint.url, headers={"Host": "evil.example"}, timeout=60)
            assert foreign.status_code == 400
            answers.append(
                endpoint.send_prompt(ModelPrompt(text="hello world", most_tokens=8)).text
            )
            trial = try_model(endpoint, "hello world a gpu is fast")
            assert trial.is_repeatable
            assert trial.first.tokens_per_second
            if trial.kv_bytes_per_token is not None:
                assert estimated <= trial.kv_bytes_per_token < estimated * 1.1
            endpoint.close()
    assert answers[0] == answers[1]
    assert answers[0]
