"""Set up the user's key on a machine that accepts only a password from them so far.

Such machines are those to which labctl logs in as the user does. The user confirms it and types
the password on a terminal; without one, the error names the command of OpenSSH that does the same.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import TypeVar

import msgspec

from labctl.errors import AuthenticationError, LabError
from labctl.events import Note, Question, Step, find_password_prompt
from labctl.lazy import lazy_imports
from labctl.model import Endpoint
from labctl.servers.context import LabContext
from labctl.servers.login_key import LoginKey, choose_login_key

with lazy_imports(__name__):
    from labctl.transports import failures, password_login

T = TypeVar("T")
MOST_PASSWORDS = 3


def call_with_key_setup(context: LabContext, function: Callable[[], T]) -> T:
    """Call a function; each time a machine refuses the user's keys, offer to set one up there.

    The function is called again after each key. AuthenticationError if a machine accepts no
    password either, if the user declines, or if it refuses the key that was set up.
    """
    keys: dict[Endpoint, LoginKey] = {}
    while True:
        try:
            return function()
        except AuthenticationError as error:
            endpoint = error.endpoint
            if endpoint is None or not context.logs_in_as_user:
                raise
            if endpoint in keys:
                raise _make_still_refused_error(endpoint, keys[endpoint]) from error
            keys[endpoint] = _set_up_key(context, endpoint, error)


def _set_up_key(context: LabContext, endpoint: Endpoint, refusal: AuthenticationError) -> LoginKey:
    """Authorize one of the user's keys with their password, and return the key."""
    user_config = context.connections.user_config
    if user_config.path is None:
        raise refusal
    wire, known_hosts = user_config.add_jump_command(endpoint), user_config.known_hosts
    methods = password_login.list_login_methods(wire, known_hosts)
    key = choose_login_key(endpoint.identity, user_config.path.parent)
    if not methods & {password_login.PASSWORD, password_login.INTERACTIVE}:
        refusal.hint = _describe_public_key(key)
        raise refusal
    refusal.hint = failures.copy_key_command(endpoint, key.path)
    if not key.public_line:
        refusal.hint = f"{key.create_command} && {refusal.hint}"
    ask = find_password_prompt(context.reporter)
    if ask is None:
        refusal.why = "the machine accepts a password, but labctl has no terminal to ask for it"
        raise refusal
    name = failures.endpoint_text(endpoint)
    if not context.reporter.confirm(_make_question(name, key)):
        refusal.why = "the machine accepts a password, and no key was set up"
        raise refusal
    line = key.create_if_new()
    step = Step(name=f"adding your key to ~/.ssh/authorized_keys of {name}")

    def authorize() -> None:
        password = ask(f"{name}'s password: ")
        context.reporter.emit(step)
        password_login.authorize_key(wire, password, line, known_hosts)

    _try_passwords(context, endpoint, authorize)
    context.reporter.emit(msgspec.structs.replace(step, done=True))
    return key


def _make_question(name: str, key: LoginKey) -> Question:
    first = (
        f"{name} does not accept your key {key.name}."
        if key.public_line
        else f"You have no SSH key for {name} yet. labctl would create {key.path}."
    )
    return Question(
        question="Set up the key there now?",
        detail=f"{first}\nThe machine accepts a password. labctl can log in with it once and add "
        "the key\nto ~/.ssh/authorized_keys there, as ssh-copy-id does. It stores no password.",
        default=True,
    )


def _try_passwords(context: LabContext, endpoint: Endpoint, authorize: Callable[[], None]) -> None:
    """Call `authorize`, which asks for a password, until one is accepted."""
    for number in range(1, MOST_PASSWORDS + 1):
        try:
            return authorize()
        except AuthenticationError as error:
            if number < MOST_PASSWORDS:
                context.reporter.emit(Note(text=f"{error.what}; try again", level="warning"))
                continue
            raise AuthenticationError(
                f"{error.what} ({MOST_PASSWORDS} tries)",
                endpoint=endpoint,
                why=f"the password is wrong, the user is not called {endpoint.user} there, or the "
                "machine allows no password for this user",
                hint=f"{context.subject.up}   # asks again; the user name is in "
                f"{context.subject.config_file}",
            ) from error


def _describe_public_key(key: LoginKey) -> str:
    """Return the command that shows the key which an administrator has to add."""
    shown = shlex.join(["cat", f"{key.path}.pub"]) if key.path else "ssh-add -L"
    if not key.public_line:
        shown = f"{key.create_command} && {shown}"
    return f"{shown}   # send this public key to the machine's administrator"


def _make_still_refused_error(endpoint: Endpoint, key: LoginKey) -> LabError:
    words = ["ssh", "-v", *(("-i", key.path) if key.path else ())]
    words += ["-p", str(endpoint.port)] if endpoint.port != 22 else []
    words += ["-J", endpoint.jump] if endpoint.jump else []
    shown = shlex.join([*words, f"{endpoint.user}@{endpoint.host}"])
    return AuthenticationError(
        f"{failures.endpoint_text(endpoint)} still does not accept your key {key.name}",
        endpoint=endpoint,
        why="the key is in ~/.ssh/authorized_keys there; sshd may ignore the file because other "
        "users may write to the home directory, or because keys are kept elsewhere",
        hint=f"{shown}   # shows which keys are refused",
    )
