"""The container of a run inside a job of Slurm, by the runtime that its machine has.

The runtime is one of the user's own account, and the container is a part of the job. A command
beside the run gets a container of its own, with the same directories.

Docker alone is not one of the runtimes: its daemon starts containers outside of the job, so they
would not be limited to its GPUs, and would not end with it. On the machines of a course, labctl's
broker has the daemon start them inside (broker/slurm_jobs.py).
"""

from __future__ import annotations

import shlex
from functools import reduce
from typing import NamedTuple

from ...wire.runs import BROKER
from ..broker import detection
from ..host.paths import labctl_home, require_name
from ..host.server_data import resolve_all
from .containers import HOME_ENV, build_run_env
from .executor import JobImage, NewAttempt

APPTAINER, SINGULARITY, PODMAN = "apptainer", "singularity", "podman"
PYXIS = "pyxis"
# In the order in which they are looked for.
RUNTIMES = (APPTAINER, SINGULARITY, PODMAN, PYXIS)
# Beside the scripts of an attempt: the mark that its container has used up the memory of its job.
OUT_OF_MEMORY = "out-of-memory"
# Of the job: they are passed on if they are set.
_JOB_VARIABLES = ("CUDA_VISIBLE_DEVICES", "SLURMD_NODENAME", "SLURM_JOB_ID", "LABCTL_ENTER")
_ENTRY = ("sh", "/lab/run/.labctl/entry.sh")
# Beside the logs, as without a container: relative paths mean the same.
WORK = "/lab/run/code"
_FIND = r"""
fail() { echo "labctl: $1" >&2; exit 126; }
has() {
  case $1 in
    pyxis) srun --help 2>/dev/null | grep -q -e --container-image ;;
    broker) [ -S "${DOCKER_HOST#unix://}" ] && command -v docker >/dev/null 2>&1 ;;
    none) true ;;
    *) command -v "$1" >/dev/null 2>&1 ;;
  esac
}
[ "$runtime" != broker ] || export DOCKER_HOST=unix://SOCKET
if [ "$runtime" = apptainer ] && ! has apptainer; then runtime=singularity; fi
if [ "$runtime" = auto ]; then
  for runtime in RUNTIMES none; do ! has "$runtime" || break; done
fi
[ "$runtime" != none ] || fail "$(hostname) has none of RUNTIMES to run a container"
has "$runtime" || fail "$(hostname) has no $runtime to run a container"
tty= pty=
[ ! -t 0 ] || { tty=-t; pty=--pty; }
name=labctl-$SLURM_JOB_ID-$$
engine=$runtime
[ "$runtime" != broker ] || engine=docker
# Makes the image's /etc/passwd with our user, as containers.py does: libraries look up their user.
prepare_broker() {
  docker image inspect "$1" >/dev/null 2>&1 || docker pull "$1" >&2 || exit 125
  id=$(docker image inspect --format '{{.Id}}' "$1" | cut -d : -f 2 | cut -c 1-24)
  passwd=$home/.passwd/passwd-$id
  [ ! -e "$passwd" ] || return 0
  mkdir -p "$home/.passwd"
  docker run --rm --network none --entrypoint cat "$1" /etc/passwd 2>/dev/null |
    awk -F : -v "uid=$(id -u)" 'NF == 7 && $3 != uid' >"$passwd.$$"
  echo "lab:x:$(id -u):$(id -g):labctl:/lab/cache/home:/bin/sh" >>"$passwd.$$"
  mv "$passwd.$$" "$passwd"
}
remove_container() {
  if [ "$(docker inspect --format '{{.State.OOMKilled}}' "$name" 2>/dev/null)" = true ]; then
    echo "labctl: the container needed more memory than its job has" >&2
    [ -n "$LABCTL_ENTER" ] || touch "${0%/*}/OUT_OF_MEMORY"
  fi
  docker rm --force "$name" >/dev/null 2>&1
}
# The first process of podman without root ends at a signal before its container does.
run_engine() {
  trap '"$engine" kill --signal TERM "$name" >/dev/null 2>&1' TERM
  trap '"$engine" kill --signal INT "$name" >/dev/null 2>&1' INT
  exec 3<&0
  "$@" <&3 &
  child=$!
  while :; do
    wait "$child"
    code=$?
    kill -0 "$child" 2>/dev/null || break
  done
  if [ "$code" -gt 128 ]; then
    wait "$child" 2>/dev/null
    own=$?
    [ "$own" -eq 127 ] || code=$own
  fi
  [ "$runtime" != broker ] || remove_container
  exit "$code"
}
"""


class JobMount(NamedTuple):
    """A directory of the cluster that the container has at `target`."""

    source: str
    target: str
    is_read_only: bool = False

    def render(self) -> str:
        return f"{self.source}:{self.target}{':ro' if self.is_read_only else ''}"


class JobContainer(NamedTuple):
    """What the container of a run has.

    `inherited` are the names of variables whose values the job has: secrets are in no argv.
    """

    image: str
    mounts: tuple[JobMount, ...]
    variables: dict[str, str]
    inherited: tuple[str, ...]
    has_gpu: bool = False
    shm_bytes: int = 0


def build_container_enter_script(attempt: NewAttempt, image: JobImage) -> str:
    """Return the script that runs a command in a container with the environment of an attempt."""
    spec = attempt.spec
    (labctl_home() / ".cache" / "home").mkdir(parents=True, exist_ok=True)
    variables = {**HOME_ENV, **build_run_env(spec.id), **spec.env}
    if not spec.job.gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    inherited = tuple(sorted({*spec.secrets, *_JOB_VARIABLES} - set(variables)))
    has_gpu = bool(spec.job.gpus)
    container = JobContainer(
        spec.image, _list_mounts(attempt), variables, inherited, has_gpu, spec.shm_bytes
    )
    starts = {each: _build_start_line(each, container) for each in (*RUNTIMES, BROKER)}
    names = {"RUNTIMES": " ".join(RUNTIMES), "SOCKET": detection.BROKER}
    names["OUT_OF_MEMORY"] = OUT_OF_MEMORY
    return "\n".join(
        [
            "#!/bin/sh",
            f"runtime={shlex.quote(image.runtime)} home={shlex.quote(str(labctl_home()))}",
            reduce(lambda text, name: text.replace(name, names[name]), names, _FIND),
            "case $runtime in",
            *(f"{runtime}) {line} ;;" for runtime, line in starts.items()),
            "esac",
            "",
        ]
    )


def _list_mounts(attempt: NewAttempt) -> tuple[JobMount, ...]:
    run, data = attempt.directory, attempt.root / "data"
    data.mkdir(exist_ok=True)
    sets = resolve_all(attempt.spec.data)
    for name in sets:  # the empty directory on which a container mounts it
        (data / require_name(name)).mkdir(exist_ok=True)
    return (
        JobMount(str(run), "/lab/run"),
        JobMount(str(run / "code"), "/lab/code"),
        JobMount(str(data), "/lab/data", is_read_only=True),
        *(JobMount(str(source), f"/lab/data/{name}", True) for name, source in sets.items()),
        JobMount(str(labctl_home() / ".cache"), "/lab/cache"),
    )


def _build_start_line(runtime: str, container: JobContainer) -> str:
    """Return the last line. $tty and $pty are options where a terminal is attached."""
    before, after = build_container_words(runtime, container)
    if runtime == PODMAN:
        return f'run_engine {shlex.join(before)} --name "$name" $tty {shlex.join(after)} "$@"'
    if runtime == BROKER:
        passwd = '--mount "type=bind,source=$passwd,target=/etc/passwd,readonly"'
        start = f'{shlex.join(before)} --name "$name" $tty {passwd} {shlex.join(after)} "$@"'
        return f"prepare_broker {shlex.quote(container.image)}; run_engine {start}"
    pty = "$pty " if runtime == PYXIS else ""
    return f'exec {shlex.join(before)} {pty}{shlex.join(after)} "$@"'


def build_container_words(runtime: str, container: JobContainer) -> tuple[list[str], list[str]]:
    """Return the command line of a runtime: before and after its option for a terminal.

    The words of the run's command follow it.
    """
    if runtime in (APPTAINER, SINGULARITY):
        return _build_apptainer_words(runtime, container)
    if runtime == PYXIS:
        return _build_pyxis_words(container)
    if runtime == BROKER:
        return _build_broker_words(container)
    return _build_podman_words(container)


def _build_apptainer_words(runtime: str, container: JobContainer) -> tuple[list[str], list[str]]:
    """https://apptainer.org/docs/user/main/cli/apptainer_exec.html; it passes variables on."""
    prefix = f"{runtime.upper()}ENV_"
    variables = [f"{prefix}{name}={value}" for name, value in sorted(container.variables.items())]
    binds = [word for mount in container.mounts for word in ("--bind", mount.render())]
    image = container.image
    source = f"docker-archive:{image}" if image.endswith(".tar") else image
    after = [*(["--nv"] if container.has_gpu else []), "--no-home", *binds, "--pwd", WORK]
    after.append(source if source.startswith(("/", "docker-archive:")) else f"docker://{source}")
    return ["env", *variables, runtime, "exec"], [*after, *_ENTRY]


def _build_pyxis_words(container: JobContainer) -> tuple[list[str], list[str]]:
    """https://github.com/NVIDIA/pyxis: srun passes variables on."""
    variables = [f"{name}={value}" for name, value in sorted(container.variables.items())]
    names = sorted({*container.variables, *container.inherited})
    mounts = ",".join(mount.render() for mount in container.mounts)
    after = [
        f"--container-image={_name_for_enroot(container.image)}",
        f"--container-mounts={mounts}",
        f"--container-workdir={WORK}",
        f"--container-env={','.join(names)}",
        "--no-container-mount-home",
    ]
    step = ["srun", "--quiet", "--overlap", "--nodes=1", "--ntasks=1"]
    return ["env", *variables, *step], [*after, *_ENTRY]


def _name_for_enroot(image: str) -> str:
    """Return an image as enroot names it: registry.example#name:tag."""
    host, slash, name = image.partition("/")
    is_host = bool(slash and host) and ("." in host or ":" in host or host == "localhost")
    return f"{host}#{name}" if is_host else image


def _build_broker_words(container: JobContainer) -> tuple[list[str], list[str]]:
    """The broker adds the user, the control group of the job, and which GPUs are the job's."""
    variables = [f"{name}={value}" for name, value in sorted(container.variables.items())]
    envs = [word for each in (*variables, *container.inherited) for word in ("--env", each)]
    mounts = [word for mount in container.mounts for word in ("--mount", _render_bind(mount))]
    own = ["--gpus=all"] if container.has_gpu else []
    own += [f"--shm-size={container.shm_bytes}"] if container.shm_bytes else []
    entry, script = _ENTRY
    after = [*own, f"--workdir={WORK}", *envs, *mounts, f"--entrypoint={entry}", container.image]
    return ["docker", "run", "-i"], [*after, script]


def _render_bind(mount: JobMount) -> str:
    read_only = ",readonly" if mount.is_read_only else ""
    return f"type=bind,source={mount.source},target={mount.target}{read_only}"


def _build_podman_words(container: JobContainer) -> tuple[list[str], list[str]]:
    """The control group of the job stays in force, and the user is that of the job."""
    variables = [f"{name}={value}" for name, value in sorted(container.variables.items())]
    envs = [word for each in (*variables, *container.inherited) for word in ("--env", each)]
    volumes = [word for mount in container.mounts for word in ("--volume", mount.render())]
    image = container.image
    image = f"docker-archive:{image}" if image.startswith("/") else image
    own = ["--userns=keep-id", "--cgroups=disabled"]
    own += ["--device=nvidia.com/gpu=all"] if container.has_gpu else []
    after = [*own, "--network=host", f"--workdir={WORK}", *envs, *volumes]
    entry, script = _ENTRY
    return [PODMAN, "run", "--rm", "-i"], [*after, f"--entrypoint={entry}", image, script]
