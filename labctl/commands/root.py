"""Scripts that run as root on a server, whichever account logs in there. Pure functions."""

from __future__ import annotations

import shlex

# The exit code of a script of `as_root` whose account is not root and may not use sudo.
NO_ROOT_EXIT_CODE = 77


def as_root(script: str, *words: str) -> str:
    """Return the script as root runs it, with `words` as its arguments.

    The machine says who logs in: the name in an endpoint may be an alias, or root without its uid.
    """
    line = shlex.join(["sh", "-c", script, *(["sh", *words] if words else [])])
    return (
        f'if [ "$(id -u)" = 0 ]; then {line}; '
        f"elif sudo -n true; then sudo -n {line}; else exit {NO_ROOT_EXIT_CODE}; fi"
    )
