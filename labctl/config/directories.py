"""The directories of labctl on this machine, and the only access to the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from labctl.lazy import lazy_imports
from labctl.model import Value

with lazy_imports(__name__):
    import getpass


class Paths(Value, frozen=True):
    """Absolute directories and files; none of them needs to exist.

    `keys_dir` is never below `state_dir` by default: the state may be deleted, keys may not.
    `cache_dir` may be deleted at any time.
    `find_data_dir` holds the package's images/, playbooks/ and templates/.
    """

    home: Path
    state_dir: Path
    config_dir: Path
    keys_dir: Path
    ssh_dir: Path
    log_dir: Path
    data_dir: Path
    cache_dir: Path
    user_ssh_config: Path

    @property
    def config_file(self) -> Path:
        return self.config_dir / "config.yaml"

    @property
    def keep_dir(self) -> Path:
        """The labs that others have exported to this machine's keeper."""
        return self.keys_dir.parent / "keep"

    @property
    def completion_dir(self) -> Path:
        """The scripts with which shells complete labctl's command lines."""
        return self.keys_dir.parent / "completion"

    @property
    def database(self) -> Path:
        return self.state_dir / "labctl.db"


def student_key(places: Paths) -> Path:
    """Return the private key that identifies the user to courses: to submit, to get servers."""
    return places.keys_dir / "submit" / "id_ed25519"


def copy_environment() -> dict[str, str]:
    """Return a copy of this process's environment, for layers that may not read it themselves."""
    return dict(os.environ)


def find_user_name() -> str:
    """Return the name of the user of this process."""
    return getpass.getuser()


def find_person_name() -> str:
    """Return the login name of the person who runs this process, also if they became root."""
    user = find_user_name()
    if user != "root":
        return user
    try:
        return os.environ.get("SUDO_USER") or os.getlogin()
    except OSError:  # without a terminal, for example in a container
        return user


def find_home(environ: Mapping[str, str]) -> Path:
    """Return the user's home directory in an environment."""
    return Path(environ.get("HOME") or Path.home())


def find_paths(environ: Mapping[str, str] | None = None) -> Paths:
    """Return the paths for an environment: LABCTL_STATE_DIR, the XDG directories, the defaults."""
    variables = os.environ if environ is None else environ
    home = find_home(variables)
    base = home / ".config"
    config_dir = _resolve_xdg_directory(variables.get("XDG_CONFIG_HOME", ""), base) / "labctl"
    data_home = _resolve_xdg_directory(
        variables.get("XDG_DATA_HOME", ""), home / ".local" / "share"
    )
    cache_home = _resolve_xdg_directory(variables.get("XDG_CACHE_HOME", ""), home / ".cache")
    state_home = _resolve_xdg_directory(
        variables.get("XDG_STATE_HOME", ""), home / ".local" / "state"
    )
    own_state_dir = variables.get("LABCTL_STATE_DIR", "")
    state_dir = expand(own_state_dir, home) if own_state_dir else state_home / "labctl"
    return Paths(
        home=home,
        state_dir=state_dir,
        config_dir=config_dir,
        keys_dir=data_home / "labctl" / "keys",
        ssh_dir=state_dir / "ssh",
        log_dir=state_dir / "logs",
        data_dir=find_data_dir(),
        cache_dir=cache_home / "labctl",
        user_ssh_config=home / ".ssh" / "config",
    )


def find_data_dir() -> Path:
    """Return the directory of docs/, images/, playbooks/ and templates/.

    It is inside a wheel, or the root of a checkout.
    """
    package = Path(__file__).resolve().parents[1]
    shipped = package / "_data"
    return shipped if shipped.is_dir() else package.parent


def expand(text: str, home: Path) -> Path:
    """Return `text` as an absolute path; a leading `~` is `home`."""
    if text == "~" or text.startswith("~/"):
        return home / text[2:]
    return Path(text).absolute()


def expand_user(path: str | Path) -> Path:
    """Return a path as a shell reads it: a leading `~` or `~NAME` is a home directory."""
    return Path(path).expanduser()


def _resolve_xdg_directory(text: str, default: Path) -> Path:
    """Apply XDG's rule: an empty or relative path counts as not set."""
    return Path(text) if text.startswith("/") else default
