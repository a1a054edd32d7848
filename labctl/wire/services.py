"""Messages about services: TensorBoard, Jupyter, a model server or any program with a port."""

from typing import Dict, NamedTuple, Optional, Tuple

from .images import BuildResult
from .node_access import NodeAccess
from .runs import DOCKER
from .verbs import StreamingVerb, Verb

# Why a model without predict.py cannot be served, and the next step, which both sides say.
NEEDS_PREDICT = (
    "predict.py loads the model: it must define load(checkpoints), which returns an object with "
    "`classes` and predict(images)"
)
NEEDS_CHECKPOINT = "`labctl serve` loads what a run saves in the directory $LABCTL_CHECKPOINT_DIR"
SAVE_CHECKPOINT = "save the model there in your code, then:\nlabctl run"
WRITE_PREDICT = "labctl serve --push   # once predict.py is beside lab.yaml"


# What `missing` names where the lab's code has never been pushed.
CODE = "code"


class ServedModel(NamedTuple):
    """The model that labctl's own server program serves.

    `where` is "run" (the run's files on this server) or "here" (a pulled copy, sent back), `code`
    is "run" (the run's own) or "lab" (what was pushed last). `checkpoint` is one of the run's
    checkpoints, "" for all of them.
    """

    run: str
    where: str = "run"
    code: str = "run"
    checkpoint: str = ""


class ServiceRequest(NamedTuple):
    """A requested service. `command` is argv in the container, () for services known to labctl.

    `port` is its port in the container, 0 for a known service's usual one. `args` and `wheelhouse`
    are for building an image with its programs, if needed; `dockerfile` is the text of the file
    that adds them, and `app` has the files of the model server by name. With `as_is`, the image's
    own entrypoint runs, followed by `command`. A running service with other settings is kept,
    unless `replace` is set. `deadline_s` is how long it may take until it answers, 0 for the usual
    time. The limits apply to a `model` and to `as_is`; 0 means no limit. `data` and `executor` are
    those of RunSpec; a plain process has the environment `image`, "" for the server's programs.
    `access_key` is the public key for the machine of a job, where services of a cluster run; with
    it, a port that has no command is looked for there. A `command` with `test` is a program of
    labctl's choice: `test` succeeds in an image that has it, others are extended by `args`; it sees
    `weights`, a model that was pushed, at /lab/model, and `secrets`, which are never on a disk.
    """

    lab: str
    lab_id: str
    name: str
    image: str
    command: Tuple[str, ...] = ()
    port: int = 0
    gpus: str = ""
    args: Dict[str, str] = {}
    wheelhouse: bool = False
    env: Dict[str, str] = {}
    model: Optional[ServedModel] = None
    as_is: bool = False
    replace: bool = False
    deadline_s: float = 0.0
    memory_bytes: int = 0
    cpus: float = 0.0
    shm_bytes: int = 0
    dockerfile: str = ""
    app: Dict[str, str] = {}
    data: Dict[str, str] = {}
    executor: str = DOCKER
    access_key: str = ""
    test: str = ""
    weights: str = ""
    secrets: Dict[str, str] = {}


class ServiceReply(NamedTuple):
    """The service, once its port answers; or why it was not started.

    `missing` is the image if it is not on the server, or CODE for a plain process without one.
    `lacks` is the service if the image has to be extended with it first, and `tag` is the name of
    the extended image. `found` is whether the service was running already, `stale` whether it runs
    with other settings than the requested ones, `replaced` whether it replaced one with other
    settings. `node` leads to the machine of a cluster where the port is, None for the server
    itself. The other fields are those of ServiceRecord.
    """

    name: str = ""
    port: int = 0
    socket: str = ""
    token: str = ""
    path: str = "/"
    container: str = ""
    running: bool = False
    found: bool = False
    stale: bool = False
    replaced: bool = False
    missing: str = ""
    lacks: str = ""
    tag: str = ""
    node: Optional[NodeAccess] = None


class ServiceRecord(NamedTuple):
    """A service that has a container, running or not.

    `port` is on the server's loopback, 0 while none is published. On a shared server the service
    listens on the Unix socket `socket` instead; `port` is then the container's.
    """

    name: str
    port: int
    socket: str
    token: str
    path: str
    container: str
    running: bool


class ListServicesRequest(NamedTuple):
    lab: str
    lab_id: str
    executor: str = DOCKER


class ProcessServiceRecord(NamedTuple):
    """A service without a container (service-NAME.json): its first process, as in a ProcessRecord,
    its port on the loopback, and a hash of its settings.
    """

    pid: int
    start_ticks: int
    port: int
    settings: str


class JobServiceRecord(NamedTuple):
    """A service that is a step of a job of Slurm (service-NAME.json), and a hash of its settings.

    `run` is the run whose job it is. `step` is the step's name, which no other step has.
    """

    run: str
    job_id: str
    step: str
    settings: str


class ServiceStepRequest(NamedTuple):
    """What the step of a service runs. With `test`, which succeeds if the service's programs are
    there, it is a service of labctl: its port may be another one, and is its last argument.
    """

    command: Tuple[str, ...]
    port: int
    test: str = ""


class ServiceStepReply(NamedTuple):
    """The port of a service on its machine, or why it was not started."""

    port: int = 0
    is_missing: bool = False
    is_port_taken: bool = False


class ListServicesReply(NamedTuple):
    services: Tuple[ServiceRecord, ...]


class StopServiceRequest(NamedTuple):
    """`name` "" is every service of the lab."""

    lab: str
    lab_id: str
    name: str = ""
    executor: str = DOCKER


class StopServiceReply(NamedTuple):
    """The names of the services that had a container, or ran."""

    stopped: Tuple[str, ...]


class ServiceImageOpening(NamedTuple):
    """The path of the build's log on the server, and the name of the image."""

    log: str
    tag: str


class BackgroundForwardReply(NamedTuple):
    """The reply of the process on the user's machine that holds a forward, if it is open."""

    pid: int
    local_port: int


START_SERVICE = Verb("service", ServiceRequest, ServiceReply)
LIST_SERVICES = Verb("services", ListServicesRequest, ListServicesReply)
STOP_SERVICES = Verb("service-stop", StopServiceRequest, StopServiceReply)
BUILD_SERVICE_IMAGE = StreamingVerb(
    "service-image", ServiceRequest, ServiceImageOpening, BuildResult
)
