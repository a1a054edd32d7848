"""Network adapters with RDMA, such as InfiniBand or AWS's Elastic Fabric Adapter (EFA)."""

from __future__ import annotations

from pathlib import Path

# Device nodes of adapters, through which programs send without the kernel. There are others, with
# which a program could manage the whole network.
NODES = Path("/dev/infiniband")
# The kernel's entry of each adapter, which names its driver.
ADAPTERS = Path("/sys/class/infiniband")
NODE_NAMES = ("uverbs*", "rdma_cm")
EFA_DRIVER = "efa"


def list_device_nodes() -> list[str]:
    """List the device nodes of this server's adapters; none on a server without any."""
    paths = [path for name in NODE_NAMES for path in NODES.glob(name)]
    return sorted(str(path) for path in paths if path.is_char_device())


def build_adapter_env() -> dict[str, str]:
    """Return the variable that has libfabric, and so NCCL's plugin for it, use an EFA.

    NCCL needs that plugin (aws-ofi-nccl) in the image, and otherwise uses TCP.
    """
    drivers = {path.resolve().name for path in ADAPTERS.glob("*/device/driver")}
    return {"FI_PROVIDER": EFA_DRIVER} if EFA_DRIVER in drivers else {}
