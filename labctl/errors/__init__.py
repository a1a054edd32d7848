"""Every error that labctl raises on purpose.

    LabError                     1    something failed
    ├── UsageError               2    the command or call is not valid as typed
    │   └── UnknownNameError     2    no command or provider has that name
    ├── ConfigError              2    lab.yaml (or another file) is wrong; holds every Problem
    ├── PolicyError              3    refused on purpose: budget, overwrite, trust
    │   ├── BudgetError          3    the rest of the budget does not pay for one hour
    │   ├── UnguardedCostError   3    no guard ends these costs, and nobody agreed to them
    │   ├── NameTakenError       3    another run has that name
    │   └── HostKeyError         3    the server's host key is not the pinned one
    ├── NotFoundError            4    nothing has that name
    ├── BusyError               75    try again later
    │   ├── LockHeldError       75    another process holds the lock
    │   ├── SchedulerBusyError  75    the scheduler of a cluster does not answer now
    │   └── ConnectError        75    the server cannot be reached now
    │       ├── DnsError        75    the host name does not resolve
    │       ├── ConnectionRefusedByServerError 75  the machine is up, sshd does not listen
    │       ├── TurnedAwayError 75  sshd hung up before its banner: too many simultaneous logins
    │       └── LinkLostError   75    the connection died while in use
    ├── AuthenticationError      1    the server does not accept our key
    ├── CommandError             1    a command on the server failed
    ├── ProviderError            1    the provider refused or failed
    │   ├── EngineError          1    no usable Docker Engine
    │   ├── CredentialsError     1    no credentials, or the provider does not accept them
    │   ├── DeniedError          1    the account lacks the permission
    │   ├── QuotaError           1    the account's quota is too small
    │   ├── NoOfferError         4    nothing fits the need
    │   ├── CapacityError       75    no machine left for this offer now; the next one may have some
    │   └── ThrottledError      75    too many calls; repeat the same call later
    ├── BuildError               1    an image did not build
    ├── TransferError            1    files did not arrive completely
    │   └── DiskFullError        1    the disk has no space for them
    └── InterruptError         130    Ctrl-C

An error has three parts, shown in this order: what failed (`str(error)`), why (`why`), and the
exact next command to type (`hint`). Code that does not know whether it works for a lab or for a
seat of a course gives a function of the `Subject` as the first or the last part, and code that
knows it sets `subject`. The functions are kept in `failed_step` and `next_step`, so that failures
of several seats can be compared (`courses/seat_results.py`).

May import: model, shell, events, retry and wire.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from labctl.errors.subject import LAB, Subject, Text, render_text

if TYPE_CHECKING:
    from labctl.model import Endpoint


class LabError(Exception):
    """Something failed. `why` is the cause in plain words, `hint` the next command to type."""

    exit_code = 1

    def __init__(
        self, what: Text, *, why: str = "", hint: Text = "", subject: Subject = LAB
    ) -> None:
        super().__init__(what)
        self.failed_step = what
        self.why = why
        self.next_step = hint
        self.subject = subject

    def __str__(self) -> str:
        return self.what

    @property
    def what(self) -> str:
        return render_text(self.failed_step, self.subject)

    @what.setter
    def what(self, what: Text) -> None:
        self.failed_step = what

    @property
    def hint(self) -> str:
        return render_text(self.next_step, self.subject)

    @hint.setter
    def hint(self, hint: Text) -> None:
        self.next_step = hint


@contextmanager
def assign_subject(subject: Subject) -> Iterator[None]:
    """Let errors raised inside name the commands for `subject`, unless they have another one."""
    try:
        yield
    except LabError as error:
        if error.subject == LAB:
            error.subject = subject
        raise


class UsageError(LabError):
    exit_code = 2


class UnknownNameError(UsageError):
    """No command or provider is called `typed`; `near` is what was probably meant, or ""."""

    def __init__(
        self, what: Text, *, why: str = "", hint: Text = "", typed: str = "", near: str = ""
    ) -> None:
        super().__init__(what, why=why, hint=hint)
        self.typed = typed
        self.near = near


class Problem(NamedTuple):
    """One mistake in a file: where (dotted path of the key, line from 1) and what.

    `origin` is the option, variable or other file that the value came from, "" for the file itself.
    `near` is the existing name that was probably meant by `typed`, the value; or "".
    """

    path: str
    line: int
    message: str
    origin: str = ""
    typed: str = ""
    near: str = ""


class ConfigError(LabError):
    """A file has mistakes. `problems` holds all of them, in the order of their lines."""

    exit_code = 2

    def __init__(
        self, what: str, problems: tuple[Problem, ...] = (), *, why: str = "", hint: Text = ""
    ) -> None:
        super().__init__(what, why=why, hint=hint)
        self.problems = problems


class PolicyError(LabError):
    """Refused on purpose."""

    exit_code = 3


class BudgetError(PolicyError):
    pass


class UnguardedCostError(PolicyError):
    """No guard at the provider would end a server's costs, and the user did not agree to them."""


class NameTakenError(PolicyError):
    """Another run has the name that was typed for a new one."""


class HostKeyError(PolicyError):
    pass


class UnknownHostKeyError(HostKeyError):
    """Nobody has confirmed the host key yet; a changed key is a HostKeyError."""


class NotFoundError(LabError):
    """`near` is the existing name that was probably meant by `typed`, a word of the user; or ""."""

    exit_code = 4

    def __init__(
        self,
        what: Text,
        *,
        why: str = "",
        hint: Text = "",
        subject: Subject = LAB,
        typed: str = "",
        near: str = "",
    ) -> None:
        super().__init__(what, why=why, hint=hint, subject=subject)
        self.typed = typed
        self.near = near


class BusyError(LabError):
    exit_code = 75


class LockHeldError(BusyError):
    """Another process holds a lock. `holder` describes it, and since when it has it, if known."""

    def __init__(self, what: str, *, holder: str = "", why: str = "", hint: Text = "") -> None:
        super().__init__(what, why=why, hint=hint)
        self.holder = holder


class SchedulerBusyError(BusyError):
    """`labctl run` exits with 75 too: a script may repeat it, and the run starts once."""


class ConnectError(BusyError):
    pass


class DnsError(ConnectError):
    pass


class UnreachableError(ConnectError):
    """The machine does not answer."""


class ConnectionRefusedByServerError(UnreachableError):
    """The machine answers, but nothing listens on the port."""


class TurnedAwayError(ConnectError):
    """sshd is still starting, or already has as many pending logins as MaxStartups allows."""


class LinkLostError(ConnectError):
    pass


class NoCommonNetworkError(LabError):
    """The servers of a lab do not reach one another; trying again does not help."""


class AuthenticationError(LabError):
    """The server does not accept our key. `endpoint` is where the login failed, if known."""

    def __init__(
        self, what: str, *, endpoint: Endpoint | None = None, why: str = "", hint: Text = ""
    ) -> None:
        super().__init__(what, why=why, hint=hint)
        self.endpoint = endpoint


class CommandError(LabError):
    """A command on the server failed. `code` is its exit code, `stderr` its error output."""

    def __init__(
        self, what: str, *, code: int, stderr: str = "", why: str = "", hint: Text = ""
    ) -> None:
        super().__init__(what, why=why or stderr.strip()[-2000:], hint=hint)
        self.code = code
        self.stderr = stderr


class ProviderError(LabError):
    pass


class EngineError(ProviderError):
    pass


class CredentialsError(ProviderError):
    pass


class DeniedError(ProviderError):
    pass


class QuotaError(ProviderError):
    pass


class NoOfferError(ProviderError):
    """No offer fits. `why` names each condition and the offers that it ruled out, one a line."""

    exit_code = 4


class CapacityError(ProviderError):
    exit_code = 75


class ThrottledError(ProviderError):
    exit_code = 75


class BuildError(LabError):
    """An image did not build. `log_path` is the path of the complete log, on the server."""

    def __init__(self, what: str, *, log_path: str = "", why: str = "", hint: Text = "") -> None:
        super().__init__(what, why=why, hint=hint)
        self.log_path = log_path


class TransferError(LabError):
    pass


class DiskFullError(TransferError):
    pass


class InterruptError(LabError):
    exit_code = 130
