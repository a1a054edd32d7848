"""The sample projects that `labctl init --template` offers, and what each teaches."""

from __future__ import annotations

DEFAULT_TEMPLATE = "image-classifier"
# Each is a directory below templates/ with a lab.yaml.j2, a requirements.txt and a README.md, or
# several such directories (TEMPLATE_LAYERS).
PROJECT_TEMPLATES = {
    DEFAULT_TEMPLATE: "a complete training, with evaluation and curves",
    "text-generator": "a small GPT learns a text; compilation, activations, a cache",
    "fine-tune": "a language model learns to answer, with LoRA",
    "cuda-kernel": "one addition in CUDA C, in Triton and by PyTorch; bandwidth",
    "ddp": "several GPUs share each batch; what exchanging gradients costs",
    "fsdp": "each GPU keeps a part of the parameters (FSDP2)",
    "zero": "each GPU keeps a part of the optimizer state (ZeRO-1)",
    "accelerate": "one program for one GPU or several, by Hugging Face Accelerate",
    "tabular": "a table: scikit-learn, XGBoost or LightGBM, without a GPU",
    "tensorflow": "an image classifier in Keras, with mixed precision",
    "jax": "the same in JAX with Flax and optax",
}
# The directories of a template that shares files with others.
TEMPLATE_LAYERS = {
    "text-generator": ("shared-text", "text-generator"),
    "fine-tune": ("shared-text", "fine-tune"),
    "tabular": ("shared", "tabular"),
    "tensorflow": ("shared", "shared-digits", "tensorflow"),
    "jax": ("shared", "shared-digits", "jax"),
}


def list_layers(template: str) -> tuple[str, ...]:
    """List the template's directories; a file of a later one replaces that of an earlier one."""
    return TEMPLATE_LAYERS.get(template, (template,))
