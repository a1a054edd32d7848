"""Rules of lab.yaml that concern several values, such as settings that need a container."""

from __future__ import annotations

from labctl.config.document import escape, quote
from labctl.config.lab_providers import LabProviders
from labctl.config.lab_values import LabValues
from labctl.config.scalars import format_duration
from labctl.config.schema import ImageFile, LabFile
from labctl.config.tracking import find_tracking_problem

# Why a setting for containers cannot apply to plain processes.
LISTS = (
    '`image: {python: "3.11", requirements: requirements.txt}` or `image: {conda: environment.yml}`'
)
_LISTS_ONLY = f"without containers labctl makes an environment from a list of packages: {LISTS}"
_NO_FILE = "is a file of a cluster; write name:tag or registry/name:tag"
NO_JOB_BUILDS = (
    "machines with Slurm build no images: build it on another computer, push it to a registry and "
    "write `image: registry.example/name:tag`"
)
_LISTS_IN_JOBS = "a job runs in an environment of these packages, not in a container"
_ALL_MEMORY = "as a plain process a run uses all the memory and processors of the server"


class LabChecks:
    """Checks the values of one lab against each other, and reports what does not fit."""

    def __init__(self, values: LabValues, providers: LabProviders) -> None:
        self.values = values
        self.providers = providers

    def check_all(self, file: LabFile) -> None:
        """Check rules that concern several values, such as duplicates."""
        for key, names in (("secrets", file.secrets), ("outputs", file.outputs)):
            for name in {name for name in names if names.count(name) > 1}:
                self.values.report(key, f"{quote(name)} is listed twice")
        if problem := find_tracking_problem(file.track, file.secrets):
            self.values.report("track.wandb", problem)
        longest = file.server.max_ttl
        if longest and file.server.ttl and file.server.ttl > longest:
            message = f"is longer than max_ttl ({format_duration(longest)})"
            self.values.report("server.ttl", message)
        if self.providers.get_job_executor(file.server.provider):
            self.check_job_executor(file)
        elif file.server.executor == "slurm":
            self.check_granted_job_executor(file)
        elif self.providers.choose_executor(file) == "process":
            self.check_process_executor(file)
        elif isinstance(file.image, str) and file.image.startswith("/"):
            self.values.report("image", _NO_FILE)
        self.check_count(file)
        self.check_fallback(file)
        for name in sorted(set(file.secrets) & set(file.env)):
            message = "is also in secrets; lab.yaml must not contain the value of a secret"
            self.values.report(f"env.{name}", message)

    def check_fallback(self, file: LabFile) -> None:
        """Report a fallback that is not installed, or that cannot replace another provider."""
        for name in file.server.fallback:
            if self.providers.find_provider is None:
                return
            traits = self.providers.find_traits(name)
            if traits is None:
                message = f"there is no provider called {quote(name)}; {self.providers.installed}"
                self.values.report("server.fallback", message)
            elif traits.job_executor or traits.for_students or traits.is_market:
                self.values.report("server.fallback", f"{name} cannot replace another provider")

    def check_count(self, file: LabFile) -> None:
        """Report settings that only one server, or only several, can have."""
        provider, count = file.server.provider, file.server.count
        traits = self.providers.traits.get(provider)
        is_market = traits is not None and traits.is_market
        if count > 1 and traits and (traits.job_executor or traits.for_students):
            self.values.report("server.count", f"{provider} gives a lab one server")
        if count > 1 and (is_market or self.providers.list_candidates(file)):
            message = "several servers come from one provider: name it, without `fallback`"
            self.values.report("server.count", message)
        if file.launch.restarts and not file.launch.launcher and count == 1:
            message = "needs `with: torchrun`, or several servers"
            self.values.report("launch.restarts", message)
        if file.launch.stall_s and count == 1:
            message = "needs several servers: write `count: 2`, or remove `stall`"
            self.values.report("launch.stall", message)
        if "server.network" in self.values.leaves and count == 1:
            self.check_network(file)

    def check_network(self, file: LabFile) -> None:
        """Report a network between servers if there is one server; `auto` may be written."""
        if "server.count" not in self.values.leaves or file.server.network != "auto":
            message = "needs several servers: write `count: 2`, or remove `network`"
            self.values.report("server.network", message)

    def check_process_executor(self, file: LabFile) -> None:
        """Report settings that need a container."""
        image, no_engine = file.image, self.providers.get_no_engine(file.server.provider)
        because = f" ({no_engine})" if no_engine else ""
        if no_engine and file.server.executor != "process":
            # The default is no choice, and the provider makes it.
            self.values.refuse_settings(
                ("server.executor", f"{no_engine}: write `process`, or nothing")
            )
        reasons = dict.fromkeys(("image.build", "image.registry", "image.store"), _LISTS_ONLY)
        if not isinstance(image, ImageFile) or not (image.requirements or image.conda):
            reasons = {"image": _LISTS_ONLY}
        reasons.update(dict.fromkeys(("limits.memory", "limits.cpus", "limits.shm"), _ALL_MEMORY))
        start = f"needs a container{because}"
        self.values.refuse_settings(*((key, f"{start}; {why}") for key, why in reasons.items()))

    def check_job_executor(self, file: LabFile) -> None:
        """Report settings that a job of a cluster cannot have."""
        no_deadline = "a login node has no deadline; `time` under `slurm` limits each job"
        self.check_job_gpu(file)
        self.values.refuse_settings(
            ("server.executor", "each run is a job of the cluster; leave this out"),
            *((f"server.{key}", no_deadline) for key in ("ttl", "max_ttl", "idle", "budget")),
            *self.list_image_problems(file),
            ("limits.shm", "the containers of a cluster share the memory of the job"),
            ("store", "nothing of labctl runs on a login node that could save results there"),
        )

    def check_granted_job_executor(self, file: LabFile) -> None:
        """Report settings that a job on a course's machine cannot have."""
        traits = self.providers.traits.get(file.server.provider)
        if traits is not None and not traits.for_students:
            why = "only a course grants servers with Slurm; for a cluster, write `provider: slurm`"
            self.values.refuse_settings(("server.executor", why))
            return
        self.check_job_gpu(file)
        self.values.refuse_settings(("store", "the course saves results"))
        if isinstance(file.image, ImageFile):
            self.check_job_packages(file.image)
        elif file.image.startswith("/"):
            self.values.refuse_settings(("image", _NO_FILE))
        if not (isinstance(file.image, str) and file.image):
            why = "needs a container, so write the name of an image: `image: NAME`"
            self.values.refuse_settings(("limits.shm", why))

    def check_job_packages(self, image: ImageFile) -> None:
        """Report what a list of packages cannot have in a job, or else that nothing is built."""
        if image.requirements or image.conda:
            keys = ("image.build", "image.registry", "image.store")
            self.values.refuse_settings(*((key, _LISTS_IN_JOBS) for key in keys))
        else:
            self.values.refuse_settings(("image", f"{NO_JOB_BUILDS}; for packages alone: {LISTS}"))

    def check_job_gpu(self, file: LabFile) -> None:
        """Report a minimum of GPU memory, which Slurm does not know."""
        message = (
            "Slurm does not know the memory of GPUs; write a type that the cluster has: a100:2"
        )
        if file.server.gpu.min_memory_bytes:
            self.values.report("server.gpu", message)
        self.values.refuse_settings(("server.gpu_memory", message))

    def list_image_problems(self, file: LabFile) -> list[tuple[str, str]]:
        """List keys that a cluster may refuse, and why: it builds and stores no images."""
        image, provider = file.image, file.server.provider
        runtime = self.values.find_leaf(f"server.{escape(provider)}.runtime").value
        if isinstance(image, str):
            why = f"needs a container, which `runtime: none` refuses; {_LISTS_ONLY}"
            return [("image", why)] if runtime == "none" else []
        if image.requirements or image.conda:
            why = "a cluster stores no images; it makes an environment from the list of packages"
            return [(key, why) for key in ("image.build", "image.registry", "image.store")]
        build = (
            "a cluster builds no images: push it to a registry and name it, or make a file of it"
        )
        return [("image", f"{build} there, such as /shared/image.sif; {_LISTS_ONLY}")]
