"""The model to fine-tune: local weights, one of the hub, or a tiny one.

The hub is that of Hugging Face. The tiny model has random weights and reads
bytes. It shows that everything works, without a download.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

# PEFT asks Transformers for attributes by their old names.
warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
TINY = "tiny"
# A directory with weights. `data: {base: ./base}` in lab.yaml sends it.
OWN_WEIGHTS = Path(os.environ.get("LABCTL_DATA_DIR", ".")) / "base"


class BaseError(Exception):
    """The weights cannot be loaded; the message says what to change."""


def load(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer, in float32. Raises BaseError.

    `name` is a directory, a name on the hub, or "tiny". Only safetensors are loaded: other
    weights are pickles, which run code. So does `trust_remote_code`, which stays off.
    """
    if name == TINY:
        return make_tiny()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, use_safetensors=True
        )
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise BaseError(f"{name} cannot be loaded: {str(error).splitlines()[0]}") from None
    if tokenizer.eos_token_id is None:
        raise BaseError(f"the tokenizer of {name} has no end token, with which answers end")
    return model, tokenizer


def make_tiny() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Make a Llama of 107,072 random parameters, the same each time. A token is a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        # The usual 0.02 is for wide models: here no score could grow large.
        initializer_range=0.2,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config), fast


def add_adapter(model: PreTrainedModel, rank: int, dropout: float) -> PeftModel:
    """Freeze the model, and add two thin matrices to each of its linear layers.

    A layer computes W x. LoRA adds B A x, where A has `rank` rows and B `rank` columns. B begins
    with zeros, so the first step begins with the model as it was.
    """
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=dropout,
        target_modules="all-linear",
    )
    return get_peft_model(model, config)


def fingerprint(model: PreTrainedModel) -> str:
    """Hash the frozen weights: an adapter belongs to one model."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(value.shape)}".encode())
        # A part of a large matrix is enough to tell two models apart.
        digest.update(value.flatten()[:4096].cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
