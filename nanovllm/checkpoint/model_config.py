"""ModelConfig: the sizes and settings of a decoder, and its parts: rope, attention, windows, experts, recurrent layers.

read_config.py makes it from a checkpoint's config.json or GGUF metadata. Importing this module loads neither torch nor
transformers.
"""

from dataclasses import dataclass, field, replace

from nanovllm.checkpoint.quantization import CHECKPOINT_FORMATS, HEAD_QUANTIZATIONS, QUANTIZATIONS, Quantization
from nanovllm.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")
HEAD_DIMS = (16, 32, 64, 80, 96, 112, 128, 160, 192, 256, 512)  # the kernels are tested with these
MAX_MLP_TOKENS = 8192  # tokens whose MLP is computed together, which bounds the memory for its inner features


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding parameters, named as in transformers' `rope_parameters`. Each type uses some of the fields."""

    rope_type: str = "default"  # a key of ROPE_TYPES (rope.py)
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 1.0  # the share of a head that is rotated; if proportional, of its pairs
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # dynamic, yarn and llama3: the length the model was trained on
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn; so are all fields below
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The sparse MLPs of a mixture of experts. A router chooses some experts for each token."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int  # of one expert
    norm_topk_prob: bool  # divide the weights of the chosen experts by their sum
    layers: tuple[int, ...]  # the layers with a sparse MLP; all other layers have a dense MLP
    activation: str = "silu"  # as in ModelConfig
    shared_size: int = 0  # features of the expert that every token uses, scaled by a gate; 0 without such an expert
    has_bias: bool = False  # the router and the experts have biases
    # The layers whose experts are in CPU memory. KV on disk does not depend on them, so `repr` leaves them out
    cpu_layers: tuple[int, ...] = field(default=(), repr=False)

    def on_gpu(self, num_layers: int) -> "ExpertsConfig":
        """Return the configuration with the experts of `num_layers` layers on the GPU and the others in CPU memory.

        Layers on the GPU are spread evenly, so that while a long step computes one of them, the experts of the next
        layer arrive.
        """
        total = len(self.layers)
        is_on_gpu = ((i + 1) * num_layers // total > i * num_layers // total for i in range(total))
        cpu_layers = (layer for layer, is_resident in zip(self.layers, is_on_gpu, strict=True) if not is_resident)
        return replace(self, cpu_layers=tuple(cpu_layers))

    @property
    def mtp_is_on_cpu(self) -> bool:
        """True if the experts of the draft head are in CPU memory, as they are if the experts of any layer are."""
        return bool(self.cpu_layers)


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig:
    """The recurrent layers: a causal convolution over q, k and v, then the gated delta rule (layers/delta_net.py)."""

    num_key_heads: int  # heads of q and of k
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int  # tokens that the convolution reads: the token itself and the preceding tokens

    @property
    def conv_channels(self) -> int:
        """Features of q, k and v, which the convolution mixes over time."""
        return 2 * self.num_key_heads * self.key_head_dim + self.num_value_heads * self.value_head_dim


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """The heads of the attention layers of one kind. All kinds have the same number of query heads."""

    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    scale: float  # of the products of q and k

    @property
    def rotary_dim(self) -> int:
        """Number of elements at the beginning of a head that the rotary embedding rotates."""
        share = 1.0 if self.rope.rope_type == "proportional" else self.rope.partial_rotary_factor
        return int(self.head_dim * share)


@dataclass(frozen=True, kw_only=True)
class WindowConfig(AttentionConfig):
    """The layers that attend only to a window: a token sees itself and the `num_tokens` - 1 tokens before it."""

    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class GemmaConfig:
    """The settings of Gemma's layers (models/gemma.py), which norm the outputs of attention and of the MLP, too."""

    norms_v: bool = False  # an RMSNorm without a weight on every head of v
    v_from_k: bool = False  # v is the product of k_proj in the layers that attend to all keys
    has_scalars: bool = False  # a scalar multiplies the output of each layer


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and settings of a decoder."""

    architecture: str  # a key of ARCHITECTURES
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMSNorm on every head of q and k before rope
    rope: RopeConfig
    torch_dtype: str  # "float32", "bfloat16" or "float16"
    eos_token_ids: tuple[int, ...]
    quantization: Quantization | None = None  # the checkpoint's quantization
    gguf_types: tuple[str, ...] = ()  # the quantized types of a GGUF file
    head_quantization: Quantization | None = None  # of the output head, if the head is quantized at loading
    # True if the embedding table is in pinned CPU memory for a GPU. No result depends on it, so `repr` leaves it out
    embedding_on_cpu: bool = field(default=False, repr=False)
    experts: ExpertsConfig | None = None  # None if every MLP is dense
    layer_kinds: tuple[str, ...]  # one for each layer: "attention" (to all keys), "window" or "recurrent"
    recurrent: RecurrentConfig | None = None  # None if no layer is recurrent
    window: WindowConfig | None = None  # None if no layer has a window
    attention_scale: float | None = None  # of the layers that attend to all keys; None for head_dim ** -0.5
    has_sinks: bool = False  # each head has a logit that joins the softmax without a value, in all attention layers
    attention_gate: bool = False  # sigmoid gates multiply the output of attention
    norms_add_one: bool = False  # norms multiply by 1 + weight
    # Of gated MLPs: "silu", "gelu_tanh" (GELU with the tanh approximation), or "clamped_swiglu" (act_and_mul in
    # layers/linear.py)
    activation: str = "silu"
    gemma: GemmaConfig | None = None  # None if the layers are not Gemma's
    logit_softcap: float | None = None  # logits are softcap * tanh(logits / softcap); None for no bound
    has_mtp: bool = False  # the checkpoint has a draft head (MTPHead)
    # Activations of real checkpoints are larger than 65504. The dtype is then another one, so `repr` leaves this out
    exceeds_float16: bool = field(default=False, repr=False)

    @property
    def has_own_head(self) -> bool:
        """True if the output head has a weight, False if the head uses the embedding table."""
        return not self.tie_word_embeddings or self.head_quantization is not None

    @property
    def head_format(self) -> Quantization | None:
        """The format of the output head's own weight, or None if it is not quantized."""
        return self.head_quantization or self._vocabulary_format("lm_head")

    @property
    def embedding_format(self) -> Quantization | None:
        """The format of the embedding table, or None if it is not quantized. In CPU memory the table has 16 bits."""
        return None if self.embedding_on_cpu else self._vocabulary_format("model.embed_tokens")

    @property
    def gguf_head_type(self) -> str | None:
        """The type of the weight that the output head multiplies by in a GGUF file, if it is a quantized type."""
        format = self._vocabulary_format("model.embed_tokens" if self.tie_word_embeddings else "lm_head")
        return None if format is None else format.block_type

    def _vocabulary_format(self, name: str) -> Quantization | None:
        """Return the type that a GGUF file has for a weight. Other formats do not quantize the vocabulary."""
        is_gguf = self.quantization is not None and self.quantization.is_gguf
        return self.quantization.format_of(name) if self.quantization is not None and is_gguf else None

    @property
    def embedding_scale(self) -> float:
        """The factor of the rows of the embedding table."""
        return 1.0 if self.gemma is None else self.hidden_size**0.5

    @property
    def has_cpu_experts(self) -> bool:
        """True if the experts of some layers are in CPU memory."""
        return self.experts is not None and bool(self.experts.cpu_layers)

    @property
    def num_attention_layers(self) -> int:
        return self.layer_kinds.count("attention")

    @property
    def num_recurrent_layers(self) -> int:
        return self.layer_kinds.count("recurrent")

    @property
    def num_window_layers(self) -> int:
        return self.layer_kinds.count("window")

    def attention(self, kind: str) -> AttentionConfig:
        """Return the heads of the layers of a kind: "attention" or "window"."""
        if kind == "window":
            assert self.window is not None, "no layer has a window"
            return self.window
        return AttentionConfig(
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rope=self.rope,
            scale=self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale,
        )

    def v_from_k(self, kind: str) -> bool:
        """Return True if the layers of a kind have no v projection."""
        return kind == "attention" and self.gemma is not None and self.gemma.v_from_k

    @property
    def rotary_dim(self) -> int:
        """Number of elements at the beginning of a head that the rotary embedding rotates."""
        return self.attention("attention").rotary_dim

    @property
    def max_model_len_limit(self) -> int:
        """Tokens of the longest sequence that the rotary embedding covers."""
        rope = self.rope
        covered = float(self.max_position_embeddings)
        if rope.rope_type == "dynamic" or (rope.rope_type == "linear" and self.gemma is None):
            covered *= rope.factor  # Gemma 3 counts the positions after the extension
        elif rope.rope_type == "yarn":
            covered = rope.original_max_position_embeddings * rope.factor
        return max(self.max_position_embeddings, int(covered))

    def check_format(self, name: str) -> None:
        """Raise ConfigError unless the checkpoint has the format `name`, one of CHECKPOINT_FORMATS."""
        method = CHECKPOINT_FORMATS[name]
        found = "gguf" if self.gguf_types else "none" if self.quantization is None else self.quantization.method
        if method != found:
            raise ConfigError(
                f"quantization={name!r} is for checkpoints with quant_method={method!r}, and this one has {found}; "
                f"leave it out, or choose one of {', '.join(QUANTIZATIONS)}"
            )

    def quantized(self, name: str | None, head: str | None = None, num_ranks: int = 1) -> "ModelConfig":
        """Return this config with quantization at loading: of linear layers to a format of QUANTIZATIONS, unless `name`
        is None, and of the output head to a format of HEAD_QUANTIZATIONS, unless `head` is None. `num_ranks` ranks
        share the columns of some layers, which must be whole blocks on each.

        Raises ConfigError if the checkpoint is quantized already, unless `name` is its own format. Only the
        checkpoint's files tell if a head in safetensors is quantized; loading checks that.
        """
        if head is not None and self.gguf_head_type is not None:
            raise ConfigError(
                f"quantize_head={head!r} is for output heads in 16 or 32 bits, and this GGUF file has the head in "
                f"{self.gguf_head_type}; leave it out"
            )
        if name is not None and self.gguf_types:
            raise ConfigError(
                f"quantization={name!r} is for checkpoints that are not quantized, and this GGUF file has the types "
                f"{', '.join(self.gguf_types)}; leave it out"
            )
        if name is not None and self.quantization is not None and name != self.quantization.method:
            raise ConfigError(
                f"quantization={name!r} is for checkpoints that are not quantized, and this one has "
                f"quant_method={self.quantization.method!r}; leave it out"
            )
        quantized = self
        if name is not None and self.quantization is None:
            quantized = replace(self, quantization=replace(QUANTIZATIONS[name], num_ranks=num_ranks))
        return quantized if head is None else replace(quantized, head_quantization=HEAD_QUANTIZATIONS[head])
