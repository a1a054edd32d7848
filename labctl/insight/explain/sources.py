"""The references of the rules. The docs mark thresholds without a reference as rules of thumb."""

from __future__ import annotations

from labctl.model import Value


class Reference(Value, frozen=True):
    title: str
    url: str


NVML_USE = Reference(
    title="NVIDIA, NVML reference: utilization is the share of time in which any kernel ran",
    url="https://docs.nvidia.com/deploy/nvml-api/structnvmlUtilization__t.html",
)
NVML_THROTTLE = Reference(
    title="NVIDIA, NVML reference: reasons for lower clocks",
    url="https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html",
)
GPU_LOSS = Reference(
    title="NVIDIA Container Toolkit, Troubleshooting: containers losing access to GPUs",
    url="https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/troubleshooting.html",
)
GPU_BACKGROUND = Reference(
    title="NVIDIA, GPU Performance Background: limited by arithmetic, memory or latency",
    url="https://docs.nvidia.com/deeplearning/performance/dl-performance-gpu-background/",
)
TUNING = Reference(
    title="PyTorch, Performance Tuning Guide",
    url="https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
)
DATA_LOADER = Reference(
    title="PyTorch, torch.utils.data: single- and multi-process data loading",
    url="https://docs.pytorch.org/docs/stable/data.html",
)
SHARED_MEMORY = Reference(
    title="PyTorch, README: Docker image, --ipc=host or --shm-size",
    url="https://github.com/pytorch/pytorch#docker-image",
)
CUDA_NOTES = Reference(
    title="PyTorch, CUDA semantics: memory management, asynchronous execution",
    url="https://docs.pytorch.org/docs/stable/notes/cuda.html",
)
RECOMPUTATION = Reference(
    title="Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022",
    url="https://arxiv.org/abs/2205.05198",
)
OPTIMIZER_STATE = Reference(
    title="Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2021",
    url="https://arxiv.org/abs/2110.02861",
)
FAQ = Reference(
    title="PyTorch, Frequently Asked Questions: do not accumulate history across the loop",
    url="https://docs.pytorch.org/docs/stable/notes/faq.html",
)
SHELL_CODES = Reference(
    title="GNU Bash, Exit Status: 127 if a command is not found",
    url="https://www.gnu.org/software/bash/manual/html_node/Exit-Status.html",
)
DOCKER_LIMITS = Reference(
    title="Docker, Resource constraints",
    url="https://docs.docker.com/engine/containers/resource_constraints/",
)
PLAYBOOK = Reference(
    title="Godbole et al., Deep Learning Tuning Playbook, 2023",
    url="https://github.com/google-research/tuning_playbook",
)
RECIPE = Reference(
    title="Karpathy, A Recipe for Training Neural Networks, 2019",
    url="https://karpathy.github.io/2019/04/25/recipe/",
)
CLIPPING = Reference(
    title="Pascanu et al., On the difficulty of training recurrent neural networks, 2013",
    url="https://arxiv.org/abs/1211.5063",
)
MIXED_PRECISION = Reference(
    title="Micikevicius et al., Mixed Precision Training, 2018",
    url="https://arxiv.org/abs/1710.03740",
)
LEARNING_RATES = Reference(
    title="Smith, Cyclical Learning Rates for Training Neural Networks, 2017",
    url="https://arxiv.org/abs/1506.01186",
)
EARLY_STOPPING = Reference(
    title="Goodfellow et al., Deep Learning, 2016, section 7.8: early stopping",
    url="https://www.deeplearningbook.org/contents/regularization.html",
)
LAB_FILE = Reference(title="labctl, the commented lab.yaml", url="labctl docs lab.yaml")
LABCTL_IMAGES = Reference(title="labctl, images without a Dockerfile", url="labctl docs images")
LABCTL = Reference(title="labctl, the rules of explain", url="labctl docs explain")
