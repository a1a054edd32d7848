"""The shape of a language model, from the config.json of Hugging Face transformers.

A config comes from a stranger: every number is bounded, and parts that contradict each other are
refused. `count_parameters` has the formula that was compared with published figures.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from labctl.decoding import decode_json
from labctl.model import Value

# A config has a few kilobytes; some list thousands of class labels.
LARGEST_CONFIG_BYTES = 4 * 1024**2
# Architectures whose parameters were compared with published figures (tests).
COUNTED = frozenset(
    {"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "phi3"}
)
# Gemma 3 has one layer of full attention after five with a window (arXiv:2503.19786, section 2).
GEMMA3_PATTERN = 6
GEMMA2_PATTERN = 2
# Norms in a layer: before attention and before the MLP; Gemma 2 and 3 have one after each, too.
_FOUR_NORMS = frozenset({"gemma2", "gemma3_text"})
_TIED = frozenset({"gemma", "gemma2", "gemma3_text"})
_QK_NORMS = frozenset({"qwen3", "qwen3_moe", "gemma3_text"})
_WEIGHT_TYPES = {"float32": 4, "float16": 2, "bfloat16": 2}

Small = Annotated[int, msgspec.Meta(ge=1, le=100_000)]
Large = Annotated[int, msgspec.Meta(ge=1, le=100_000_000)]
# Some configs write 0 where a model has no experts and no window.
MaybeSmall = Annotated[int, msgspec.Meta(ge=0, le=100_000)]
MaybeLarge = Annotated[int, msgspec.Meta(ge=0, le=100_000_000)]
Name = Annotated[str, msgspec.Meta(max_length=100)]


class _Quantization(Value, frozen=True):
    quant_method: Name = ""


class _Config(Value, frozen=True):
    """The fields of config.json that decide about memory. Others are ignored."""

    model_type: Name = ""
    hidden_size: Large | None = None
    num_hidden_layers: Small | None = None
    num_attention_heads: Small | None = None
    num_key_value_heads: Small | None = None
    head_dim: Small | None = None
    intermediate_size: Large | None = None
    vocab_size: Large | None = None
    max_position_embeddings: Large | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool = False
    sliding_window: MaybeLarge | None = None
    use_sliding_window: bool | None = None
    max_window_layers: Annotated[int, msgspec.Meta(ge=0, le=100_000)] | None = None
    layer_types: Annotated[tuple[Name, ...], msgspec.Meta(max_length=100_000)] | None = None
    num_local_experts: MaybeSmall | None = None
    num_experts: MaybeSmall | None = None
    num_experts_per_tok: MaybeSmall | None = None
    moe_intermediate_size: MaybeLarge | None = None
    shared_expert_intermediate_size: MaybeLarge | None = None
    kv_lora_rank: Large | None = None
    torch_dtype: Name | None = None
    dtype: Name | None = None
    quantization_config: _Quantization | None = None
    text_config: dict[str, msgspec.Raw] | None = None


class ModelShape(Value, frozen=True, kw_only=True):
    """What decides about the memory of a decoder-only transformer.

    `windowed_layers` of the `layers` attend to the last `window` tokens only (0: none do).
    `experts` is 0 for a dense model; else each token uses `active_experts` of them, of width
    `expert_width`, and a shared one of `shared_width`. `weight_bytes` is the size of a weight in
    the published type. `quantized` is how the published weights are quantized, "" if they are not.
    """

    kind: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    vocabulary: int
    longest_context: int
    tied: bool = False
    qkv_bias: bool = False
    window: int = 0
    windowed_layers: int = 0
    experts: int = 0
    active_experts: int = 0
    expert_width: int = 0
    shared_width: int = 0
    weight_bytes: int = 2
    quantized: str = ""

    @property
    def is_counted(self) -> bool:
        """Whether the count of parameters was compared with published models of this kind."""
        return self.kind in COUNTED


class ParameterCount(Value, frozen=True):
    """Parameters: all of them, those that one token uses, and those of the layers' matrices.

    Only the matrices are quantized by AWQ, GPTQ and bitsandbytes; the embedding and the output
    layer stay in the published type.
    """

    total: int
    active: int
    matrices: int


def parse_shape(text: bytes) -> ModelShape:
    """Read the shape from a config.json; ValueError, with the reason, if it has none.

    For a model of text and pictures it is that of `text_config`.
    """
    if len(text) > LARGEST_CONFIG_BYTES:
        raise ValueError(f"it is larger than {LARGEST_CONFIG_BYTES // 1024**2} MiB")
    try:
        config = decode_json(text, _Config)
        if config.text_config is not None and config.hidden_size is None:
            config = decode_json(msgspec.json.encode(config.text_config), _Config)
    except msgspec.ValidationError as error:  # names the field
        raise ValueError(str(error)) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise ValueError("it is damaged: not valid JSON") from None
    return _build_shape(config)


def _build_shape(config: _Config) -> ModelShape:
    if config.kv_lora_rank is not None:
        raise ValueError("multi-head latent attention (kv_lora_rank) is not computed yet")
    hidden = _require(config.hidden_size, "hidden_size")
    heads = _require(config.num_attention_heads, "num_attention_heads")
    layers = _require(config.num_hidden_layers, "num_hidden_layers")
    kv_heads = config.num_key_value_heads or heads
    if heads % kv_heads:
        raise ValueError(f"{heads} attention heads cannot share {kv_heads} key-value heads")
    if config.head_dim is None and hidden % heads:
        raise ValueError(f"hidden_size {hidden} cannot be divided among {heads} heads")
    experts = config.num_local_experts or config.num_experts or 0
    width = config.intermediate_size or config.moe_intermediate_size
    window, windowed = _find_window(config, layers)
    dtype = config.dtype or config.torch_dtype or "float32"
    return ModelShape(
        kind=config.model_type,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=config.head_dim or hidden // heads,
        width=_require(width, "intermediate_size"),
        vocabulary=_require(config.vocab_size, "vocab_size"),
        longest_context=_require(config.max_position_embeddings, "max_position_embeddings"),
        tied=_is_tied(config),
        qkv_bias=config.attention_bias or config.model_type in ("qwen2", "qwen2_moe"),
        window=window,
        windowed_layers=windowed,
        experts=experts if experts > 1 else 0,
        active_experts=min(config.num_experts_per_tok or 1, experts) if experts > 1 else 0,
        expert_width=(config.moe_intermediate_size or width or 0) if experts > 1 else 0,
        shared_width=(config.shared_expert_intermediate_size or 0) if experts > 1 else 0,
        weight_bytes=_WEIGHT_TYPES.get(dtype, 2),
        quantized=config.quantization_config.quant_method if config.quantization_config else "",
    )


def _require(value: int | None, name: str) -> int:
    if value is None:
        raise ValueError(f"it has no {name}, so it is not the config of a language model")
    return value


def _is_tied(config: _Config) -> bool:
    """Whether the output layer is the embedding; transformers' default differs by architecture."""
    if config.tie_word_embeddings is not None:
        return config.tie_word_embeddings
    return config.model_type in _TIED


def _find_window(config: _Config, layers: int) -> tuple[int, int]:
    """Return the sliding window and the number of layers that use it; (0, 0) for none.

    Newer configs list the type of each layer. Before, Mistral used its window in all layers, Gemma
    2 in every second, Gemma 3 in five of six, and Qwen only if `use_sliding_window` is set, from
    `max_window_layers` on (the modules configuration_*.py of transformers).
    """
    window = config.sliding_window
    if not window or config.use_sliding_window is False:
        return 0, 0
    if config.layer_types is not None:
        if len(config.layer_types) != layers:
            raise ValueError(f"layer_types has {len(config.layer_types)} entries, not {layers}")
        return window, config.layer_types.count("sliding_attention")
    if config.model_type == "gemma2":
        return window, layers - layers // GEMMA2_PATTERN
    if config.model_type == "gemma3_text":
        return window, layers - layers // GEMMA3_PATTERN
    if config.model_type.startswith("qwen"):
        return window, max(0, layers - (config.max_window_layers or 0))
    return window, layers


def count_parameters(shape: ModelShape) -> ParameterCount:
    """Count the parameters of a Llama-like decoder (Touvron et al., 2023, arXiv:2302.13971).

    For each layer: queries and outputs 2 h a d, keys and values 2 h k d (a query heads and k
    key-value heads of width d), three matrices h x f in the MLP, or in each expert, and norms; a
    router of h x experts (Mixtral, arXiv:2401.04088). Outside: the embedding v h, the same again
    for an output layer that is not tied, and the last norm.
    """
    h, d = shape.hidden, shape.head_dim
    attention = 2 * h * shape.heads * d + 2 * h * shape.kv_heads * d
    one_mlp = 3 * h * shape.width
    mlp, active_mlp, router = one_mlp, one_mlp, 0
    if shape.experts:
        shared = 3 * h * shape.shared_width
        mlp = shape.experts * 3 * h * shape.expert_width + shared
        active_mlp = shape.active_experts * 3 * h * shape.expert_width + shared
        router = h * shape.experts + (h if shape.shared_width else 0)
    small = h * (4 if shape.kind in _FOUR_NORMS else 2)
    small += (shape.heads + 2 * shape.kv_heads) * d if shape.qkv_bias else 0
    small += 2 * d if shape.kind in _QK_NORMS else 0
    outside = shape.vocabulary * h * (1 if shape.tied else 2) + h
    layers = shape.layers
    return ParameterCount(
        total=layers * (attention + mlp + router + small) + outside,
        active=layers * (attention + active_mlp + router + small) + outside,
        matrices=layers * (attention + mlp),
    )


KvType = Literal["fp32", "fp16", "fp8"]
KV_BYTES: dict[KvType, int] = {"fp32": 4, "fp16": 2, "fp8": 1}


def kv_bytes_per_token(shape: ModelShape, kv_type: KvType = "fp16") -> int:
    """Compute the KV cache of one token in one layer of each kind, over all layers.

    2 (key and value) x layers x key-value heads x head width x bytes: Pope et al., 2022,
    arXiv:2211.05102, section 2; grouped-query attention, Ainslie et al., 2023, arXiv:2305.13245.
    """
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * KV_BYTES[kv_type]


def kv_cache_bytes(shape: ModelShape, context: int, kv_type: KvType = "fp16") -> int:
    """Compute the KV cache of one sequence of `context` tokens.

    A layer with a sliding window keeps at most the window (Mistral, arXiv:2310.06825, section 2).
    """
    one = kv_bytes_per_token(shape, kv_type) // shape.layers
    full = (shape.layers - shape.windowed_layers) * context
    return one * (full + shape.windowed_layers * min(context, shape.window))


def longest_fitting_context(shape: ModelShape, room_bytes: int, kv_type: KvType = "fp16") -> int:
    """Return the most tokens of one sequence whose cache fits in `room_bytes`, in steps of 16.

    16 tokens are a block of vLLM's cache (Kwon et al., 2023, arXiv:2309.06180). At most the
    context that the model was made for; 0 if not even one block fits.
    """
    low, high = 0, shape.longest_context // BLOCK_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        if kv_cache_bytes(shape, middle * BLOCK_TOKENS, kv_type) <= room_bytes:
            low = middle
        else:
            high = middle - 1
    return low * BLOCK_TOKENS


BLOCK_TOKENS = 16
