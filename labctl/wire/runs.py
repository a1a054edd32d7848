"""Messages about runs."""

from typing import Dict, NamedTuple, Tuple


class RunSpec(NamedTuple):
    """The complete specification of a run, without its secrets. The server stores its hash.

    That stored hash claims the run's id. `command` is argv for the container. `image` is a
    reference that exists on the server. `gpus` is "" (no GPU), "all" or device UUIDs joined by
    commas. Sizes are in bytes; 0 is no limit.
    """

    id: str
    lab: str
    lab_id: str
    command: Tuple[str, ...]
    image: str
    env: Dict[str, str]
    secrets: Tuple[str, ...] = ()
    outputs: Tuple[str, ...] = ("checkpoints", "logs")
    gpus: str = ""
    memory_bytes: int = 0
    cpus: float = 0.0
    shm_bytes: int = 0
    tty: bool = False
