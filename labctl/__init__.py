"""GPU lab servers for students and instructors.

    from labctl import GpuNeed, Lab, Need

    lab = Lab.load("lab.yaml")
    with lab.up(Need(gpu=GpuNeed(kind="any", count=1))):
        lab.pull(lab.run(["python", "train.py"], follow=True))

Public names are imported at their first use, so `import labctl` alone is fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labctl.course import Course
    from labctl.errors import (
        AuthenticationError,
        BudgetError,
        BuildError,
        BusyError,
        CapacityError,
        CommandError,
        ConfigError,
        ConnectError,
        ConnectionRefusedByServerError,
        CredentialsError,
        DeniedError,
        DiskFullError,
        DnsError,
        EngineError,
        HostKeyError,
        InterruptError,
        LabError,
        LinkLostError,
        LockHeldError,
        NoOfferError,
        NotFoundError,
        PolicyError,
        Problem,
        ProviderError,
        QuotaError,
        ThrottledError,
        TransferError,
        TurnedAwayError,
        UsageError,
    )
    from labctl.lab import Lab
    from labctl.model import GpuNeed, Need

__version__ = "0.1.0"

__all__ = [
    "AuthenticationError",
    "BudgetError",
    "BuildError",
    "BusyError",
    "CapacityError",
    "CommandError",
    "ConfigError",
    "ConnectError",
    "ConnectionRefusedByServerError",
    "Course",
    "CredentialsError",
    "DeniedError",
    "DiskFullError",
    "DnsError",
    "EngineError",
    "GpuNeed",
    "HostKeyError",
    "InterruptError",
    "Lab",
    "LabError",
    "LinkLostError",
    "LockHeldError",
    "Need",
    "NoOfferError",
    "NotFoundError",
    "PolicyError",
    "Problem",
    "ProviderError",
    "QuotaError",
    "ThrottledError",
    "TransferError",
    "TurnedAwayError",
    "UsageError",
    "__version__",
]

_MODULES = {
    "Course": "course",
    "GpuNeed": "model",
    "Lab": "lab",
    "Need": "model",
    "Problem": "errors",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_MODULES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
