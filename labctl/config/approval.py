"""Ask before a lab.yaml, which may come from a stranger, uses anything that is the user's own.

The answer is stored under the hash of the file, so a changed file needs a new answer.
"""

from __future__ import annotations

import re
import time

import msgspec

from labctl.config.directories import Paths
from labctl.config.document import escape, make_read_error
from labctl.config.identity import write_private
from labctl.config.reader import LAB_FILE
from labctl.config.schema import LabConfig
from labctl.config.show import list_settings
from labctl.decoding import decode_json
from labctl.lazy import lazy_imports

with lazy_imports(__name__):
    import hashlib

# Key of an answer that also covers the upload of images; earlier versions never asked about it.
IMAGES = "images"


def list_trust_questions(config: LabConfig) -> list[str]:
    """List what lab.yaml itself would do with the user's own data and accounts, a phrase each.

    Empty if it names no secrets, no store, no registry, no directory outside the lab or
    on the server, no provider of other machines and no settings of the provider in use.
    """
    from_lab = _list_own_keys(config)
    questions = []
    if config.secrets:
        names = ", ".join(config.secrets)
        questions.append(f"give your {names} to the programs that it runs")
    if "store" in from_lab:
        what = "results"
        if _uploads_images(config):
            what = "results, and the image that it builds with its build arguments,"
        access = _describe_access(config.store)
        questions.append(f"copy {what} to {escape(config.store)}{access}")
    if "image.registry" in from_lab and config.image.registry:
        registry = escape(config.image.registry)
        questions.append(f"push the image that it builds, with its build arguments, to {registry}")
    questions += [
        f"send {escape(str(source.path))} to the server"
        for source in config.data.values()
        if source.path is not None and not source.inside_lab
    ]
    questions += [
        f"have the server read {escape(source.url)}"
        for source in config.data.values()
        if source.url.startswith("s3://")
    ]
    questions += [
        f"let its programs read {escape(directory)} on the server"
        for directory in config.server_data.values()
    ]
    return questions + _describe_server_use(config, from_lab)


def _list_own_keys(config: LabConfig) -> set[str]:
    """Return the settings that come from lab.yaml itself."""
    return {key for key, origin in config.origins.items() if origin.startswith(f"{LAB_FILE}:")}


def _uploads_images(config: LabConfig) -> bool:
    """Whether built images go to a store that lab.yaml itself names."""
    return config.should_store_images and "store" in _list_own_keys(config)


def _describe_access(store: str) -> str:
    """Say what else a store on an SSH server needs from the account there."""
    return ", and give the server's own key access there" if store.startswith("ssh://") else ""


def _describe_server_use(config: LabConfig, from_lab: set[str]) -> list[str]:
    provider = config.server.provider
    section = f"server.{provider}."
    named_keys = {key for key in from_lab if key.startswith(section)}
    has_others = config.server.is_market or bool(config.server.candidates)
    if has_others:
        named_keys |= {key for key in from_lab if key.startswith("server.")}
        provider = " or ".join(config.server.candidates or (provider,))
    elif not config.server.on_this_machine:
        # Settings of another provider, as in server.local.memory, are not in use.
        named_keys |= {key for key in from_lab if re.fullmatch(r"server\.[^.]+", key)}
    details = [
        f"{key.removeprefix(section).removeprefix('server.')} {value}"
        for key, value, _ in list_settings(config)
        if key != "server.provider"
        and value not in ("", "0")  # omitted in an entry of a list
        and any(_is_named(key, named) for named in named_keys)
    ]
    if not named_keys:
        return []
    if "server.provider" not in from_lab:
        choices = details or [key.removeprefix("server.") for key in sorted(named_keys)]
        settings = escape("; ".join(choices))
        return [f"start a server from {provider} with these settings: {settings}"]
    text = f" ({escape('; '.join(details))})" if details else ""
    is_here = config.server.on_this_machine and not has_others
    where = " on this machine" if is_here else ", a shared or paid machine"
    return [f"use a server from {provider}{where}{text}"]


def format_trust_command(config: LabConfig) -> str:
    """Return the command that approves this lab.yaml as it is used now."""
    if config.origins.get("server.provider") == "--provider":
        return f"labctl trust --provider {config.server.provider}"
    return "labctl trust"


def _is_named(key: str, named: str) -> bool:
    """Whether a setting is one that the file names, contains one, or is part of one."""
    return named == key or named.startswith(f"{key}.") or key.startswith((f"{named}.", f"{named}["))


def is_trusted(paths: Paths, config: LabConfig) -> bool:
    """Whether there is nothing to ask, or exactly this file was approved before.

    The same file may have been approved while only results went to its store.
    """
    if not list_trust_questions(config):
        return True
    answer = _read_answers(paths).get(_hash_file(config))
    return answer is not None and bool(answer.get(IMAGES) or not _uploads_images(config))


def trust(paths: Paths, config: LabConfig) -> None:
    """Store the user's approval of exactly this file."""
    answers = _read_answers(paths)
    answers[_hash_file(config)] = {
        "lab": str(config.path),
        "at": round(time.time()),
        IMAGES: int(_uploads_images(config)),
    }
    write_private(paths.config_dir / "trust.json", msgspec.json.encode(answers))


def _hash_file(config: LabConfig) -> str:
    return hashlib.sha256(config.content).hexdigest()


def _read_answers(paths: Paths) -> dict[str, dict[str, str | int]]:
    file = paths.config_dir / "trust.json"
    try:
        return decode_json(file.read_bytes(), dict[str, dict[str, str | int]])
    except FileNotFoundError:
        return {}
    except msgspec.MsgspecError:
        # A damaged file counts as unanswered, so labctl asks again.
        return {}
    except OSError as error:
        raise make_read_error(file, error) from error
