"""Bytes of a language model's weights in the formats that servers of language models load.

Bits per weight include scales. Sources:

- AWQ and GPTQ: 4 bits and, for each group of 128, a scale of 16 bits and a zero of 4 bits
  (arXiv:2306.00978, arXiv:2210.17323; the defaults of AutoAWQ and GPTQModel).
- bitsandbytes: NF4 with a scale of 32 bits for each 64 weights (QLoRA, arXiv:2305.14314, section
  3, without double quantization); LLM.int8() with one scale a row (arXiv:2208.07339).
- GGUF: the table for Llama 3.1 8B in llama.cpp's tools/quantize/README.md; Q4_0, Q5_0 and Q8_0
  have 32 weights and a scale of 16 bits in a block.
"""

from __future__ import annotations

import re

from labctl.estimate.language_model import ModelShape, count_parameters

GGUF = "gguf:"
BITS = {"awq": 4 + 20 / 128, "gptq": 4 + 20 / 128, "bnb-4bit": 4 + 32 / 64, "int8": 8.0}
GGUF_BITS = {
    "F32": 32.0,
    "F16": 16.0,
    "BF16": 16.0,
    "Q8_0": 8.5,
    "Q6_K": 6.57,
    "Q5_K_M": 5.7,
    "Q5_K_S": 5.57,
    "Q5_0": 5.5,
    "Q4_K_M": 4.89,
    "Q4_K_S": 4.67,
    "Q4_0": 4.5,
    "Q3_K_L": 4.3,
    "Q3_K_M": 4.0,
    "Q3_K_S": 3.64,
    "Q2_K": 3.16,
}
NONE = "none"
# From the most to the least exact: the first that fits is proposed.
PROPOSED = ("int8", "bnb-4bit", "awq", "gguf:Q8_0", "gguf:Q5_K_M", "gguf:Q4_K_M", "gguf:Q2_K")
_FORMAT = re.compile(r"gguf:([A-Za-z0-9_]{2,12})\Z")


def parse_format(text: str) -> str:
    """Return the name of a format in its usual spelling; ValueError for an unknown one."""
    if text.lower() in (NONE, *BITS):
        return text.lower()
    match = _FORMAT.match(text)
    if match and match[1].upper() in GGUF_BITS:
        return GGUF + match[1].upper()
    known = ", ".join([NONE, *BITS])
    kinds = ", ".join(GGUF_BITS)
    raise ValueError(f"{text!r} is not one of {known}, or gguf: with one of {kinds}")


def weight_bytes(shape: ModelShape, form: str) -> int:
    """Compute the bytes of all weights in a format.

    GGUF's figures are averages over all weights. The other formats quantize the matrices of the
    layers, and leave the rest in the published type.
    """
    count = count_parameters(shape)
    if form.startswith(GGUF):
        return round(count.total * GGUF_BITS[form.removeprefix(GGUF)] / 8)
    if form == NONE:
        return count.total * shape.weight_bytes
    rest = (count.total - count.matrices) * shape.weight_bytes
    return round(count.matrices * BITS[form] / 8 + rest)
