"""A tiny random Llama, written for transformers and as GGUF with the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WIDTH, MLP, LAYERS, HEADS, KV_HEADS, CONTEXT = 64, 128, 2, 4, 2, 512
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def write(folder: Path) -> tuple[Path, Path]:
    """Return the directory of transformers and the GGUF file."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>", "<unk>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(["hello world a gpu is fast " * 50], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = TEMPLATE
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(fast), hidden_size=WIDTH, intermediate_size=MLP,
            num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
            max_position_embeddings=CONTEXT, bos_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip
    directory = folder / "llama"
    model.save_pretrained(directory)
    fast.save_pretrained(directory)
    file = folder / "tiny.gguf"
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    _write_gguf(file, model, fast, merges)
    return directory, file


def _write_gguf(file: Path, model: Any, fast: Any, merges: list[Any]) -> None:
    import gguf
    import numpy as np

    vocabulary = [text for text, _ in sorted(fast.get_vocab().items(), key=lambda one: one[1])]
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if index < 3 else 1 for index in range(len(vocabulary))])
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for key, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        for part, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
            if key.endswith(f"{part}.weight"):
                # GGUF has the two halves of a rotation interleaved.
                split = values.reshape(heads, 2, values.shape[0] // heads // 2, -1)
                values = split.swapaxes(1, 2).reshape(values.shape)
        base, _, suffix = key.rpartition(".")
        writer.add_tensor(f"{names.get_name(base)}.{suffix}", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
