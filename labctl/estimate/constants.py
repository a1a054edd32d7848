"""Constants of the estimate, each with its source or marked as an assumption.

Sources, as the rest of the package names them:

- ZeRO: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
  2019, arXiv:1910.02054, section 3.
- Recomputation: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
  Models", 2022, arXiv:2205.05198, sections 4 and 5.
- 8-bit: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021, arXiv:2110.02861.
- Scaling: Kaplan et al., "Scaling Laws for Neural Language Models", 2020, arXiv:2001.08361,
  section 2.1; Hoffmann et al., 2022, arXiv:2203.15556, appendix F.
- PaLM: Chowdhery et al., 2022, arXiv:2204.02311, section 4.1 and appendix B.
- Megatron: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
  Megatron-LM", 2021, arXiv:2104.04473, section 5.1 and appendix.
"""

from __future__ import annotations

from typing import Literal, get_args

Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "int8", "int4"]
Optimizer = Literal["sgd", "momentum", "adam", "adamw", "adam8bit"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
OPTIMIZERS: tuple[Optimizer, ...] = get_args(Optimizer)

# Per parameter. TF32 is how tensor cores read fp32, which stays as it is in memory (NVIDIA A100
# white paper, 2020). The scales that int8 and int4 keep per group are left out: 16 bits for each
# 128 weights, as AWQ (arXiv:2306.00978) has them, add 3% to int4.
BYTES: dict[str, float] = {
    "fp32": 4,
    "tf32": 4,
    "fp16": 2,
    "bf16": 2,
    "fp8": 1,
    "int8": 1,
    "int4": 0.5,
}

# Trained with an fp32 copy of the weights (Micikevicius et al., 2017, arXiv:1710.03740).
MIXED = frozenset({"fp16", "bf16", "fp8"})
# Only for weights in inference, not for training.
QUANTIZED = frozenset({"int8", "int4"})

MASTER_BYTES = 4
# Number of values that an optimizer keeps per parameter.
STATES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2, "adam8bit": 2}
# Bytes of each of these values. ZeRO: fp32; 8-bit: one byte.
STATE_BYTES = {"sgd": 4, "momentum": 4, "adam": 4, "adamw": 4, "adam8bit": 1}

# Assumption: fp8 is for products, gradients stay in bf16 (Micikevicius et al., 2022,
# arXiv:2209.05433, use fp8 only for the inputs of matrix products).
FP8_GRADIENT_BYTES = 2

# Assumption where none is given: Llama 2's (arXiv:2307.09288); BERT has 30,522.
DEFAULT_VOCABULARY = 32_000
# Assumption where no number of heads is given: GPT-3's and Llama's; BERT and GPT-2 have 64.
HEAD_WIDTH = 128

# Assumption, per process and GPU: CUDA's context, loaded kernels, workspaces of cuBLAS and cuDNN.
# Seen in practice are 0.3 to 2 GiB (vram.asmirnov.xyz); Hugging Face's "Model training anatomy"
# shows 1.3 GB.
OVERHEAD_BYTES = 1024**3

# Assumption: the share of a GPU's peak that training reaches. Published: GPT-3 21%, Gopher 33%,
# PaLM 46% (PaLM, table 3), Megatron 44 to 52%, Llama 3 38 to 43% (arXiv:2407.21783, table 4).
# Small networks and slow data loading reach far less.
UTILIZATION = 0.40

# Assumption: what a laptop's cores really do per second in fp32.
CPU_FLOPS = 100e9
# Assumption: what a laptop's memory gives: more than half of two channels of DDR4-3200.
CPU_BYTES_PER_S = 30e9
# Assumption: a training that a laptop ends within this needs no GPU.
CPU_PATIENCE_S = 1800.0
# Assumption: ten tokens per second is about as fast as people read.
CPU_TOKEN_S = 0.1
# Assumption: networks up to this size train on a CPU, if the amount of data is unknown.
SMALL_PARAMETERS = 1_000_000
# Assumption: the same, if one item needs at most this many operations, forward and backward.
SMALL_ITEM_FLOPS = 1e9
# Assumption: up to this many values, a CPU is enough for trees and linear models.
TABLE_VALUES = 1e9

DAYS_A_MONTH = 30

# Assumption where no --checkpoint-time is given: what AWS's default volume (gp3) writes per second
# without extra payment.
CHECKPOINT_BYTES_PER_S = 125e6

# The largest clusters for training have about as many; more is a slip.
MOST_GPUS = 100_000
# Cards with GDDR memory: a sixteenth of it goes to error correction (nvidia-smi shows 15,360 MiB on
# a T4, 23,034 MiB on an L4). HBM has separate memory for it.
SOFT_ECC = frozenset({"K80", "M60", "T4", "T4G", "A10G", "L4", "L40S"})
SOFT_ECC_SHARE = 15 / 16
# Before Ampere. bf16 and TF32 run there at the speed of fp32 at best.
NO_BF16 = frozenset({"K80", "M60", "V100", "T4", "T4G"})
# Kepler and Maxwell: current builds of PyTorch leave them out, so they are never recommended.
OLD_CARDS = frozenset({"K80", "M60"})
# From Ada, Hopper and CDNA 3 on: twice the rate of fp16, by the data sheets.
FP8_CARDS = frozenset({"L4", "RTX 4090", "L40S", "H100", "H200", "B200", "MI300X"})
# TF32 at the rate of fp16, by the vendor's documentation; NVIDIA's cards have half of it.
FULL_TF32_CARDS = frozenset({"Trainium"})
