"""Continue a text with a trained network, byte by byte.

python predict.py "The student"             # the best in ./checkpoints
python predict.py "Two and" --from runs/RUN --temperature 0
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor

import checkpoints
import evaluate
from checkpoints import CheckpointError
from model import GPT, Cache


@torch.inference_mode()
def continue_text(
    model: GPT,
    prompt: bytes,
    count: int,
    temperature: float = 0.0,
    seed: int = 0,
    *,
    use_cache: bool = True,
) -> bytes:
    """Return the prompt with `count` more bytes. Temperature 0 takes the likeliest byte each time.

    The network sees `context` bytes at once. When they are full, it goes on with the newer half
    of them, which has new positions: the cache begins again.
    """
    model.eval()
    context, device = model.shape.context, model.tokens.weight.device
    dice = torch.Generator().manual_seed(seed)
    tokens = list(prompt or b"\n")
    window = tokens[-context:]
    cache = None
    for _ in range(count):
        if cache is None and use_cache:
            cache = Cache(model.shape, model.tokens.weight)
        # The cache knows all tokens but the newest.
        new = window if cache is None or cache.length == 0 else window[-1:]
        scores = model(torch.tensor([new], device=device), cache)[0, -1]
        token = choose(scores.float().cpu(), temperature, dice)
        tokens.append(token)
        window.append(token)
        if len(window) > context:
            window, cache = window[-max(1, context // 2) :], None
    return bytes(tokens)


def choose(scores: Tensor, temperature: float, dice: torch.Generator) -> int:
    if temperature == 0:
        return int(scores.argmax())
    return int(torch.multinomial((scores / temperature).softmax(0), 1, generator=dice))


def decode(text: bytes) -> str:
    """Show bytes as text. A continuation may begin a character without ending it."""
    return text.decode(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("prompt", help="the beginning of the text")
    add("--from", dest="path", type=Path, default=checkpoints.DIRECTORY, help="a checkpoint")
    add("--count", type=int, default=200, help="bytes to add")
    add("--temperature", type=float, default=0.8, help="0: always the likeliest byte")
    add("--seed", type=int, default=0, help="same seed, same text")
    add("--no-cache", action="store_true", help="compute all keys and values for each byte")
    add("--device", default="auto", help="auto, cpu, cuda, ...")
    options = parser.parse_args()
    if options.temperature < 0:
        parser.error("--temperature must not be negative")
    try:
        checkpoint = checkpoints.best(options.path)
    except CheckpointError as error:
        raise SystemExit(f"predict: {error}") from None
    model = evaluate.load_model(checkpoint, evaluate.pick_device(options.device))
    started = time.perf_counter()
    prompt = options.prompt.encode(errors="surrogateescape")
    arguments = (options.count, options.temperature, options.seed)
    text = continue_text(model, prompt, *arguments, use_cache=not options.no_cache)
    seconds = time.perf_counter() - started
    print(decode(text))
    kind = "without" if options.no_cache else "with"
    print(f"\n{options.count / seconds:,.0f} bytes per second, {kind} a cache")


if __name__ == "__main__":
    main()
