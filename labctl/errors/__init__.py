"""Every error that labctl raises on purpose.

    LabError                     1    something failed
    ├── UsageError               2    the call makes no sense as typed
    ├── ConfigError              2    lab.yaml (or another file) is wrong; holds every Problem
    ├── PolicyError              3    refused on purpose: budget, overwrite, trust, a lease held
    │   ├── BudgetError          3    the rest of the budget does not pay for one hour
    │   └── HostKeyError         3    the server is not the one we knew
    ├── NotFoundError            4    nothing there by that name
    ├── BusyError               75    try again later
    │   ├── LockHeldError   75    another process of labctl is at work
    │   └── ConnectError        75    the server cannot be reached now
    │       ├── DnsError        75    its name does not resolve
    │       ├── ConnectionRefusedByServerError 75  the machine answers, sshd does not
    │       ├── TurnedAwayError 75  sshd hung up before it greeted: too many log in at once
    │       └── LinkLostError   75    the connection died while in use
    ├── AuthenticationError      1    the server does not accept our key
    ├── CommandError             1    a command on the server failed
    ├── ProviderError            1    the provider said no
    │   ├── EngineError          1    no usable Docker Engine
    │   ├── CredentialsError     1    none, or none that the provider takes
    │   ├── DeniedError          1    the account may not do this
    │   ├── QuotaError           1    the account's quota is too small
    │   ├── NoOfferError         4    nothing fits the need
    │   ├── CapacityError       75    this offer has no machine left now: the next may
    │   └── ThrottledError      75    too many calls: the same again, later
    ├── BuildError               1    an image did not build
    ├── TransferError            1    files did not arrive whole
    │   └── DiskFullError        1    no room for them
    └── InterruptError         130    Ctrl-C

An error has three parts, shown in this order: what failed (`str(error)`), why (`why`), and the
exact next command to type (`hint`).
"""

from __future__ import annotations

from dataclasses import dataclass


class LabError(Exception):
    """Something failed. `why` is the cause in plain words, `hint` the next command to type."""

    exit_code = 1

    def __init__(self, what: str, *, why: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.hint = hint


class UsageError(LabError):
    exit_code = 2


@dataclass(frozen=True)
class Problem:
    """One thing wrong in a file: where (dotted path of the key, line from 1) and what."""

    path: str
    line: int
    message: str


class ConfigError(LabError):
    """A file is wrong. `problems` holds everything wrong in it, in the order of its lines."""

    exit_code = 2

    def __init__(
        self, what: str, problems: tuple[Problem, ...] = (), *, why: str = "", hint: str = ""
    ) -> None:
        super().__init__(what, why=why, hint=hint)
        self.problems = problems


class PolicyError(LabError):
    exit_code = 3


class BudgetError(PolicyError):
    pass


class HostKeyError(PolicyError):
    pass


class NotFoundError(LabError):
    exit_code = 4


class BusyError(LabError):
    exit_code = 75


class LockHeldError(BusyError):
    """Another process is at work. `holder` says which one, and since when."""

    def __init__(self, what: str, *, holder: str, why: str = "", hint: str = "") -> None:
        super().__init__(what, why=why, hint=hint)
        self.holder = holder


class ConnectError(BusyError):
    pass


class DnsError(ConnectError):
    pass


class ConnectionRefusedByServerError(ConnectError):
    pass


class TurnedAwayError(ConnectError):
    """sshd starts, or has as many logins that are not through as its MaxStartups allows."""


class LinkLostError(ConnectError):
    pass


class AuthenticationError(LabError):
    pass


class CommandError(LabError):
    """A command on the server failed. `code` is its exit code, `stderr` its last words."""

    def __init__(
        self, what: str, *, code: int, stderr: str = "", why: str = "", hint: str = ""
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
    """Nothing fits. `why` says which condition ruled out what, one per line."""

    exit_code = 4


class CapacityError(ProviderError):
    exit_code = 75


class ThrottledError(ProviderError):
    exit_code = 75


class BuildError(LabError):
    """An image did not build. `log_path` is where the whole log lies (on the server)."""

    def __init__(self, what: str, *, log_path: str = "", why: str = "", hint: str = "") -> None:
        super().__init__(what, why=why, hint=hint)
        self.log_path = log_path


class TransferError(LabError):
    pass


class DiskFullError(TransferError):
    pass


class InterruptError(LabError):
    exit_code = 130
