"""GPU lab servers for students and instructors.

    from labctl import GpuNeed, Lab, Need

    lab = Lab.load("lab.yaml")
    with lab.up(Need(gpu=GpuNeed(kind="any", count=1))):
        lab.pull(lab.run(["python", "train.py"], follow=True))

Public names are imported at their first use, so `import labctl` alone is fast.
"""

from typing import TYPE_CHECKING

from labctl.lazy import offer_names

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
        NameTakenError,
        NoCommonNetworkError,
        NoOfferError,
        NotFoundError,
        PolicyError,
        Problem,
        ProviderError,
        QuotaError,
        SchedulerBusyError,
        ThrottledError,
        TransferError,
        TurnedAwayError,
        UnguardedCostError,
        UnknownHostKeyError,
        UnknownNameError,
        UnreachableError,
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
    "NameTakenError",
    "Need",
    "NoCommonNetworkError",
    "NoOfferError",
    "NotFoundError",
    "PolicyError",
    "Problem",
    "ProviderError",
    "QuotaError",
    "SchedulerBusyError",
    "ThrottledError",
    "TransferError",
    "TurnedAwayError",
    "UnguardedCostError",
    "UnknownHostKeyError",
    "UnknownNameError",
    "UnreachableError",
    "UsageError",
    "__version__",
]

_MODULES = {
    **dict.fromkeys(__all__, "errors"),
    "Course": "course",
    "GpuNeed": "model",
    "Lab": "lab",
    "Need": "model",
}

__getattr__ = offer_names(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
