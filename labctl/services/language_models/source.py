"""Where a language model comes from: a directory, a GGUF file, or the Hugging Face hub.

Nothing of the model is loaded here: only its config is read, with a limit on its size.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from labctl.config import copy_environment
from labctl.decoding import decode_json
from labctl.errors import ConnectError, NotFoundError, PolicyError, UsageError
from labctl.estimate.language_model import LARGEST_CONFIG_BYTES, ModelShape, parse_shape
from labctl.estimate.weight_formats import GGUF
from labctl.http_client import describe_failure, is_confidential, open_session, read_body
from labctl.lazy import lazy_imports
from labctl.model import Value
from labctl.services.language_models import gguf_header
from labctl.shell import command

with lazy_imports(__name__):
    import requests

CONFIG = "config.json"
HUB = "https://huggingface.co"
HUB_TOKEN = "HF_TOKEN"
TIMEOUT_S = 20
LARGEST_LISTING_BYTES = 8 * 1024**2
MOST_FILES = 10_000
# Weights that run no code when they are loaded.
WEIGHTS = ".safetensors"
GGUF_SUFFIX = ".gguf"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}\Z", re.ASCII)
_FILE = re.compile(r"(?:[\w][\w.+-]*/)*[\w][\w.+-]*\.gguf\Z", re.ASCII)


class LanguageModelSource(Value, frozen=True, kw_only=True):
    """A model, and the shape that its config says.

    `path` is absolute, "" for a model of the hub; `file` is the GGUF file, at the path or in the
    `repository`. `file_bytes` is the size of its weights on this machine, 0 if they are elsewhere.
    """

    name: str
    kind: Literal["directory", "gguf", "hub"]
    shape: ModelShape
    path: str = ""
    repository: str = ""
    file: str = ""
    file_bytes: int = 0

    @property
    def is_gguf(self) -> bool:
        return bool(self.file)


class _Sibling(Value, frozen=True):
    rfilename: Annotated[str, msgspec.Meta(max_length=1000)]


class _Listing(Value, frozen=True):
    siblings: Annotated[tuple[_Sibling, ...], msgspec.Meta(max_length=MOST_FILES)] = ()


def is_repository(name: str) -> bool:
    """Whether a text may be OWNER/NAME of the hub."""
    return _REPOSITORY.match(name) is not None


def find_source(name: str, form: str, token: str) -> LanguageModelSource:
    """Find the model, and read its config; `form` is the format of weights that is wanted.

    `token` is the value of the secret HF_TOKEN, "" without one. UsageError for a name that is
    neither a path nor that of a model on the hub.
    """
    path = Path(name)
    if path.is_dir():
        return _read_directory(name, path.resolve())
    if path.is_file():
        return _read_gguf(name, path.resolve())
    if not is_repository(name):
        raise UsageError(
            f"{name!r} is neither a directory nor the name of a model",
            why="a model is a directory with config.json, a .gguf file, or OWNER/NAME of the hub",
            hint="labctl serve --model Qwen/Qwen2.5-1.5B-Instruct",
        )
    return _ask_hub(name, form, token)


def _read_directory(name: str, path: Path) -> LanguageModelSource:
    config = path / CONFIG
    if not config.is_file():
        files = sorted(path.glob(f"*{GGUF_SUFFIX}"))
        if len(files) == 1:
            return _read_gguf(str(files[0]), files[0])
        if files:
            raise UsageError(
                f"{name} has {len(files)} GGUF files",
                why="each of them may be a model",
                hint=command("labctl", "serve", "--model", str(files[0])).render(),
            )
        raise NotFoundError(
            f"{name} has no {CONFIG}",
            why="a model of transformers has one beside its weights",
            hint=command("labctl", "serve", "--model", f"{name}/MODEL.gguf").render(),
        )
    weights = [file for file in path.glob(f"*{WEIGHTS}") if file.is_file()]
    if not weights:
        raise PolicyError(
            f"{name} has no weights as safetensors",
            why="other formats of transformers are pickles, which can run code when loaded",
            hint="model.save_pretrained(DIRECTORY)   # in Python, writes safetensors",
        )
    with config.open("rb") as file:
        text = file.read(LARGEST_CONFIG_BYTES + 1)
    return LanguageModelSource(
        name=name,
        kind="directory",
        shape=_parse(text, str(config)),
        path=str(path),
        file_bytes=sum(file.stat().st_size for file in weights),
    )


def _read_gguf(name: str, path: Path) -> LanguageModelSource:
    try:
        with path.open("rb") as file:
            shape = gguf_header.read_shape(file)
    except gguf_header.TruncatedError as error:
        again = command("labctl", "serve", "--model", name).render()
        raise UsageError(
            f"{name} is incomplete", why=str(error), hint=f"download it again, then:\n{again}"
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{name} is not a language model in the format GGUF",
            why=str(error),
            hint="labctl serve --model DIRECTORY   # for a model of transformers",
        ) from None
    size = path.stat().st_size
    return LanguageModelSource(
        name=name, kind="gguf", shape=shape, path=str(path.parent), file=path.name, file_bytes=size
    )


def _parse(text: bytes, where: str) -> ModelShape:
    try:
        return parse_shape(text)
    except ValueError as error:
        raise UsageError(
            f"labctl cannot compute the memory of this model from {where}",
            why=str(error),
            hint="labctl serve --image vllm/vllm-openai --port 8000 -- --model MODEL   # without "
            "the computation",
        ) from None


def _ask_hub(name: str, form: str, token: str) -> LanguageModelSource:
    endpoint = copy_environment().get("HF_ENDPOINT") or HUB
    if token and not is_confidential(endpoint):
        raise UsageError(
            "HF_ENDPOINT is not an https:// address",
            why=f"{HUB_TOKEN} would be sent without encryption",
            hint="unset HF_ENDPOINT",
        )
    repository, file = name, ""
    if form.startswith(GGUF):
        repository, file = _find_gguf(endpoint, name, form.removeprefix(GGUF), token)
    base = name.removesuffix("-GGUF")
    text = _get(f"{endpoint}/{base}/resolve/main/{CONFIG}", base, token, LARGEST_CONFIG_BYTES + 1)
    if text is None:
        raise _make_absent_error(base, f"the hub has no {CONFIG} of that name")
    shape = _parse(text, f"the {CONFIG} of {base}")
    return LanguageModelSource(name=name, kind="hub", shape=shape, repository=repository, file=file)


def _find_gguf(endpoint: str, name: str, kind: str, token: str) -> tuple[str, str]:
    """Return the repository and its file with these weights: the model's own, or NAME-GGUF."""
    for repository in dict.fromkeys((name, f"{name.removesuffix('-GGUF')}-GGUF")):
        text = _get(f"{endpoint}/api/models/{repository}", name, token, LARGEST_LISTING_BYTES)
        try:
            listing = decode_json(text, _Listing) if text else _Listing()
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise _make_absent_error(name, "the hub's list of its files is not valid") from None
        names = [one.rfilename for one in listing.siblings if _FILE.match(one.rfilename)]
        matches = [one for one in names if kind in re.split(r"[-./]", one.upper())]
        if matches:
            return repository, min(matches, key=len)
    raise _make_absent_error(name, f"no GGUF file with {kind}, nor in {name}-GGUF")


def _get(url: str, name: str, token: str, most_bytes: int) -> bytes | None:
    """Return the body, None if the hub has no such file. PolicyError for a gated model."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with (
            open_session() as session,
            session.get(url, headers=headers, timeout=TIMEOUT_S, stream=True) as reply,
        ):
            if reply.status_code in (401, 403):
                raise _make_gated_error(name, has_token=bool(token))
            if reply.status_code == 404:
                return None
            reply.raise_for_status()
            return read_body(reply, most_bytes)
    except requests.RequestException as error:
        raise ConnectError(
            f"the config of {name} could not be read",
            why=describe_failure(error, url),
            hint="labctl serve --model DIRECTORY   # a model on this machine needs no hub",
        ) from None


def _make_gated_error(name: str, *, has_token: bool) -> PolicyError:
    if has_token:
        return PolicyError(
            f"the hub does not give {name} to the owner of {HUB_TOKEN}",
            why="gated models need an agreement with their license, once",
            hint=f"{HUB}/{name}   # in the browser, accept the license there",
        )
    return PolicyError(
        f"{name} is gated or does not exist, and no {HUB_TOKEN} was sent",
        why=f"the token goes through `secrets: [{HUB_TOKEN}]` in lab.yaml",
        hint=f"labctl secret set {HUB_TOKEN}",
    )


def _make_absent_error(name: str, why: str) -> NotFoundError:
    return NotFoundError(
        f"the model {name} was not found", why=why, hint="labctl serve --model OWNER/NAME"
    )
