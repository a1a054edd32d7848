"""Answer a question with the fine-tuned model, and with the model as it was.

python predict.py "What is 3 plus 4? "      # the best in ./checkpoints
python predict.py "What is 3 plus 4? " --from runs/RUN
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

import checkpoints
import evaluate
from base import BaseError
from checkpoints import CheckpointError


@torch.inference_mode()
def answer(model: nn.Module, tokenizer: PreTrainedTokenizerBase, prompt: str, count: int) -> str:
    """Return the likeliest answer, of at most `count` tokens."""
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    inputs = inputs.to(next(model.parameters()).device)
    tokens = model.generate(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=tokenizer.eos_token_id,
    )
    return tokenizer.decode(tokens[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("prompt", help="the question, as in the training")
    add("--from", dest="path", type=Path, default=checkpoints.DIRECTORY, help="a checkpoint")
    add("--model", default="", help="the weights, if they are elsewhere now")
    add("--count", type=int, default=40, help="tokens at most")
    add("--device", default="auto", help="auto, cpu, cuda, ...")
    options = parser.parse_args()
    try:
        checkpoint = checkpoints.best(options.path)
        device = evaluate.pick_device(options.device)
        model, tokenizer = evaluate.load_model(checkpoint, device, options.model)
    except (BaseError, CheckpointError) as error:
        raise SystemExit(f"predict: {error}") from None
    print(answer(model, tokenizer, options.prompt, options.count))
    with model.disable_adapter():
        before = answer(model, tokenizer, options.prompt, options.count)
    print(f"before fine-tuning: {before!r}")


if __name__ == "__main__":
    main()
