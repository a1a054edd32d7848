"""Values of secrets: from a private file of the lab or course, then from the environment."""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping
from pathlib import Path

import msgspec

from labctl.config.approval import is_trusted
from labctl.config.directories import Paths
from labctl.config.document import escape, make_read_error
from labctl.config.identity import write_private
from labctl.config.scalars import parse_secret_name
from labctl.config.schema import LabConfig
from labctl.decoding import decode_json
from labctl.errors import LabError, NotFoundError, PolicyError, UsageError
from labctl.shell import Secret

MAX_SECRET_CHARACTERS = 64 * 1024


def read_secret_values(
    paths: Paths, lab_id: str, config: LabConfig, environ: Mapping[str, str]
) -> dict[str, Secret]:
    """Return the value of every secret that lab.yaml names, from the lab's file or `environ`.

    Raises PolicyError if this lab.yaml was not approved (`labctl trust`) or others can read the
    file, LabError if a value is missing.
    """
    if not config.secrets:
        return {}
    if not is_trusted(paths, config):
        raise PolicyError(
            f"{escape(config.name)} uses secrets and was not approved",
            why=f"its lab.yaml names {', '.join(config.secrets)}",
            hint="labctl trust",
        )
    stored = _read_stored(_file(paths, lab_id))
    values = {name: stored.get(name) or environ.get(name, "") for name in config.secrets}
    _require_values(values)
    return {name: Secret(value) for name, value in values.items()}


def require_secret_names(
    paths: Paths, lab_id: str, config: LabConfig, environ: Mapping[str, str]
) -> None:
    """LabError if a secret that lab.yaml names has no value; no approval is needed for that."""
    if config.secrets:
        stored = list_secret_names(paths, lab_id)
        _require_values(
            {name: name if name in stored else environ.get(name, "") for name in config.secrets}
        )


def _require_values(values: Mapping[str, str]) -> None:
    missing = [name for name, value in values.items() if not value]
    if missing:
        raise LabError(
            f"no value for {', '.join(missing)}",
            why="lab.yaml lists it under secrets, but neither labctl nor the environment has it",
            hint=f"labctl secret set {missing[0]}",
        )


def read_secret(paths: Paths, owner_id: str, name: str, environ: Mapping[str, str]) -> Secret:
    """Return a secret that labctl itself uses, of a lab or a course; LabError if it has no value.

    PolicyError if others can read the file.
    """
    value = _read_stored(_file(paths, owner_id)).get(name) or environ.get(name, "")
    if not value:
        raise LabError(
            f"no value for {name}",
            why="neither labctl nor the environment has it",
            hint=f"labctl secret set {name}",
        )
    return Secret(value)


def set_secret(paths: Paths, owner_id: str, name: str, value: Secret | str) -> None:
    """Store a secret of a lab or course. UsageError for a bad name, or a value that cannot be one.

    An empty value is an error: it comes from a program that failed, and replaces nothing.
    """
    try:
        parse_secret_name(name)
    except ValueError as error:
        raise UsageError(str(error), hint="labctl secret set WANDB_API_KEY") from None
    text = value.reveal() if isinstance(value, Secret) else value
    if not text:
        raise UsageError(
            f"the value of {name} is empty",
            why="nothing was stored or removed",
            hint=f"labctl secret set {name}\nlabctl secret remove {name}   # instead, to remove it",
        )
    if len(text) > MAX_SECRET_CHARACTERS or "\0" in text:
        raise UsageError(
            f"the value of {name} is too long or contains a NUL",
            hint=f"labctl secret set {name}   # in pieces, or as a file under data:",
        )
    file = _file(paths, owner_id)
    write_private(file, msgspec.json.encode({**_read_stored(file), name: text}))


def remove_secret(paths: Paths, owner_id: str, name: str) -> None:
    """Remove a secret of a lab or course; NotFoundError if it has no value here."""
    file = _file(paths, owner_id)
    stored = _read_stored(file)
    if name not in stored:
        raise NotFoundError(f"no value for {name} is stored", hint="labctl secret list")
    write_private(file, msgspec.json.encode({k: v for k, v in stored.items() if k != name}))


def list_secret_names(paths: Paths, owner_id: str) -> list[str]:
    """List the secrets that the file of a lab or course has values for."""
    return sorted(_read_stored(_file(paths, owner_id)))


def _file(paths: Paths, owner_id: str) -> Path:
    if not re.fullmatch(r"[0-9a-z-]{1,64}", owner_id):
        raise ValueError(f"not the id of a lab or course: {owner_id!r}")
    return paths.config_dir / "secrets" / f"{owner_id}.json"


def _read_stored(file: Path) -> dict[str, str]:
    try:
        with file.open("rb") as stream:
            mode = stat.S_IMODE(file.stat().st_mode)
            if mode & 0o077:
                raise PolicyError(
                    f"{escape(str(file))} can be read by others",
                    why=f"its mode is {mode:04o}; a file of secrets must be 0600",
                    hint=f"chmod 600 {escape(str(file))}",
                )
            return decode_json(stream.read(), dict[str, str])
    except FileNotFoundError:
        return {}
    except msgspec.MsgspecError:
        # The decoder's own message may quote the file.
        why = "it is not a mapping of names to values"
        raise LabError(f"{escape(str(file))} is damaged", why=why, hint=f"rm {file}") from None
    except OSError as error:
        raise make_read_error(file, error) from error
