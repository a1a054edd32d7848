"""The sample projects that `labctl init --template` offers, and what each teaches."""

from __future__ import annotations

DEFAULT_TEMPLATE = "image-classifier"
# Each is a directory below templates/ with a lab.yaml.j2, a requirements.txt and a README.md.
PROJECT_TEMPLATES = {
    DEFAULT_TEMPLATE: "a complete training, with evaluation and curves",
    "ddp": "several GPUs share each batch; what exchanging gradients costs",
    "fsdp": "each GPU keeps a part of the parameters (FSDP2)",
    "zero": "each GPU keeps a part of the optimizer state (ZeRO-1)",
    "accelerate": "one program for one GPU or several, with Hugging Face Accelerate",
}
