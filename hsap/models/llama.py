"""Llama-family decoder over the local rows of a packed sequence; attention is handed in at call time.

Nothing here knows of documents' borders, masks or other ranks: all that lives in the attention callable. Parameter
names are those of Hugging Face's Llama, Qwen2 and Qwen3. Every parameter is used by the forward of the module that owns
it, so ZeRO-3 can gather it by hooks, and each module is called the same number of times whatever the number of local
rows, so ranks issue the same collectives.
"""

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hsap.models.config import ModelConfig
from hsap.models.loss import token_loss_sum, token_losses
from hsap.models.mlp import SwiGLU
from hsap.models.offload import CudaMover, Mover, Shelf
from hsap.models.rope import Rope, model_rope, rotate
from hsap.models.wide import wide_dtype

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
"""Names of the parameters that stand in no layer."""
VECTORS = ("norm.weight", "bias")
"""How names end of parameters that are no matrices: norms and biases."""

# attention(q_THD, k_THD, v_THD, layer_index) -> o_THD, all on this rank's local rows. With `checkpointing="full"` it
# also has `keeping`, which takes the same and gives (o_THD, a named tuple with o and lse), and
# `resumed(q_THD, k_THD, v_THD, that tuple) -> o_THD`, as `hsap.PlannedAttention` has them.
Attention = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def rms_norm(x_TC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, computed in float32 or wider, rounded once."""
    wide_TC = x_TC.to(wide_dtype(x_TC.dtype))
    scale_T1 = torch.rsqrt(wide_TC.square().mean(dim=-1, keepdim=True) + eps)
    return (wide_TC * scale_T1 * weight_C).to(x_TC.dtype)


class RMSNorm(nn.Module):
    """`rms_norm` with its weight."""

    def __init__(self, dim: int, eps: float, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))

    def forward(self, x_TC: Tensor) -> Tensor:
        return rms_norm(x_TC, self.weight, self.eps)


class SelfAttention(nn.Module):
    """The projections on both sides of attention; attention itself is between `project` and `merge_heads`."""

    def __init__(self, config: ModelConfig, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.config = config
        options: dict[str, Any] = {"bias": config.attention_bias != "none", "device": device, "dtype": dtype}
        self.q_proj = nn.Linear(config.hidden_dim, config.q_dim, **options)
        self.k_proj = nn.Linear(config.hidden_dim, config.kv_dim, **options)
        self.v_proj = nn.Linear(config.hidden_dim, config.kv_dim, **options)
        options["bias"] = config.attention_bias == "all"
        self.o_proj = nn.Linear(config.q_dim, config.hidden_dim, **options)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps, device, dtype)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps, device, dtype)

    def project(self, x_TC: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Make q [T, H, D], k and v [T, H_kv, D] of x [T, hidden_dim]; queries and keys are turned."""
        num_rows, head_dim = x_TC.shape[0], self.config.head_dim
        q_THD = self.q_proj(x_TC).view(num_rows, self.config.num_q_heads, head_dim)
        k_THD = self.k_proj(x_TC).view(num_rows, self.config.num_kv_heads, head_dim)
        v_THD = self.v_proj(x_TC).view(num_rows, self.config.num_kv_heads, head_dim)
        if self.config.qk_norm:
            q_THD, k_THD = self.q_norm(q_THD), self.k_norm(k_THD)
        return rotate(q_THD, rope), rotate(k_THD, rope), v_THD

    def merge_heads(self, o_THD: Tensor) -> Tensor:
        """Bring attention's output [T, H, D] back to the hidden width: [T, hidden_dim]."""
        return self.o_proj(o_THD.reshape(o_THD.shape[0], self.config.q_dim))


def _once(part: Callable[..., Any], *inputs: Any) -> Any:
    """Call a part of a layer, and let autograd keep what it wants."""
    return part(*inputs)


def _twice(part: Callable[..., Any], *inputs: Any) -> Any:
    """Call a part of a layer, keep its inputs alone, and call it again in backward."""
    return checkpoint(part, *inputs, use_reentrant=False, preserve_rng_state=False)


class Layer(nn.Module):
    """One decoder layer in three parts: before attention, attention, after attention.

    With checkpointing the outer parts are made again in backward and attention is not: its output is kept, which is
    cheap beside its work and its communication (DistFlashAttn, §3.3: rematerialisation-aware checkpointing). What
    autograd keeps of a layer, in bytes a row (e of the dtype, hidden state C wide, H query heads of D, K KV heads,
    feed-forward F wide):

    - `none`: what attention saves, e·(2·H·D + 2·K·D) of q, k, v and o and 4·H of lse; and what the two parts save,
      2·((8 + e)·C + 4) at the norms and 4·e·F in the feed-forward, none of the latter with `mlp_chunk_tokens`.
    - `selective`: what attention saves, and the input, e·C. The two parts are made again one at a time.
    - `full`: o and lse, e·H·D + 4·H, and the input, e·C. The layer is made again as one, with q, k and v, and
      attention goes on from its output.
    """

    def __init__(
        self, config: ModelConfig, layer_index: int, device: Any = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.checkpointing = config.checkpointing
        self.input_layernorm = RMSNorm(config.hidden_dim, config.norm_eps, device, dtype)
        self.self_attn = SelfAttention(config, device, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_dim, config.norm_eps, device, dtype)
        self.mlp = SwiGLU(config, device, dtype)
        if config.compile:
            self._before_attention = torch.compile(self._before_attention)  # type: ignore[method-assign]  # this layer's
            self._after_attention = torch.compile(self._after_attention)  # type: ignore[method-assign]  # this layer's

    def forward(self, hidden_TC: Tensor, rope: Rope, attention: Attention, shelf: Shelf | None = None) -> Tensor:
        """Give the hidden state behind the layer. shelf: where what is kept for backward goes; None: nowhere."""
        with nullcontext() if shelf is None else shelf.layer(self.layer_index):
            if not torch.is_grad_enabled() or self.checkpointing == "none":
                return self._whole(hidden_TC, rope, attention)
            if self.checkpointing == "selective":
                return self._whole(hidden_TC, rope, attention, _twice)
            if not hasattr(attention, "resumed"):
                raise ValueError(
                    f"model.checkpointing=full takes attention that can go on from its output, and "
                    f"{type(attention).__name__} has no `keeping` and `resumed`: give an hsap.PlannedAttention, or set "
                    "model.checkpointing=selective."
                )
            return _twice(self._whole, hidden_TC, rope, _Remembering(attention, shelf))

    def _whole(self, hidden_TC: Tensor, rope: Rope, attention: Attention, run: Callable[..., Any] = _once) -> Tensor:
        """The three parts; run: calls the outer two."""
        q_THD, k_THD, v_THD = run(self._before_attention, hidden_TC, rope)
        o_THD = attention(q_THD, k_THD, v_THD, self.layer_index)
        if o_THD.shape != q_THD.shape or o_THD.dtype != q_THD.dtype:
            raise ValueError(
                f"attention in layer {self.layer_index} returned {o_THD.dtype} {tuple(o_THD.shape)} for queries of "
                f"{q_THD.dtype} {tuple(q_THD.shape)}: it must return a row for each query, in the same dtype."
            )
        return run(self._after_attention, hidden_TC, o_THD)

    def _before_attention(self, hidden_TC: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        return self.self_attn.project(self.input_layernorm(hidden_TC), rope)

    def _after_attention(self, hidden_TC: Tensor, o_THD: Tensor) -> Tensor:
        hidden_TC = hidden_TC + self.self_attn.merge_heads(o_THD)
        return hidden_TC + self.mlp(self.post_attention_layernorm(hidden_TC))


class _Remembering:
    """A layer's attention that attends the first time it is called, and from then on goes on from the outcome."""

    def __init__(self, attention: Any, shelf: Shelf | None) -> None:
        self.attention, self.shelf = attention, shelf
        self.kept: Any = None

    def __call__(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, layer_index: int) -> Tensor:
        if self.kept is None:
            o_THD, kept = self.attention.keeping(q_THD, k_THD, v_THD, layer_index)
            self.kept = self._each(kept, "put")
            return o_THD
        return self.attention.resumed(q_THD, k_THD, v_THD, self._each(self.kept, "get"))

    def _each(self, kept: Any, way: str) -> Any:
        if self.shelf is None:
            return kept
        move = getattr(self.shelf, way)
        return kept._replace(o=move(kept.o), lse=move(kept.lse))


class Head(nn.Linear):
    """The lm head and the loss in one module, so that its weight is used, and gathered, by its own forward."""

    def forward(  # type: ignore[override]  # a linear layer to those who look for its weight, not to callers
        self, hidden_TC: Tensor, targets_T: Tensor | None, per_token: bool, chunk_tokens: int, chunk_vocab: int | None
    ) -> Tensor:
        """Give the loss; chunks: rows and words, as of `token_loss_sum`. Without targets: the logits."""
        if targets_T is None:
            return super().forward(hidden_TC)
        loss = token_losses if per_token else token_loss_sum
        return loss(hidden_TC, self.weight, targets_T, chunk_tokens, chunk_vocab)


class Decoder(nn.Module):
    """Embedding, layers and final norm: everything that Hugging Face names `model.…`."""

    def __init__(self, config: ModelConfig, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_dim, device=device, dtype=dtype)
        self.layers = nn.ModuleList(Layer(config, index, device, dtype) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_dim, config.norm_eps, device, dtype)
        # Who moves what layers keep to the host, made when it is first needed.
        self.mover: Mover | None = None

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attention: Attention) -> Tensor:
        """Give the hidden states behind the final norm, [T, hidden_dim]; arguments as of `Llama.forward`."""
        hidden_TC = self.embed_tokens(tokens_T)
        config = self.config
        rope = model_rope(config, positions_T, hidden_TC.dtype)
        shelf = None
        if config.offload_checkpoints and torch.is_grad_enabled():
            self.mover = self.mover or CudaMover(hidden_TC.device)
            shelf = Shelf(self.mover, config.num_layers, rope)
        for layer in self.layers:
            hidden_TC = layer(hidden_TC, rope, attention, shelf)
        return self.norm(hidden_TC)


class Llama(nn.Module):
    """Llama decoder with its loss; `build_model` also draws the weights from a seed."""

    def __init__(self, config: ModelConfig, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, device, dtype)
        self.lm_head = Head(config.hidden_dim, config.vocab_size, bias=False, device=device, dtype=dtype)
        self.tie()

    def tie(self) -> None:
        """Make head and embedding one parameter where the config says so; moving from the meta device parts them."""
        if self.config.tied_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attention: Attention,
        targets_T: Tensor | None = None,
        per_token: bool = False,
    ) -> Tensor:
        """Sum of token losses over this rank's local rows, or the logits where no targets are given.

        tokens, positions, targets: int [T], local rows; positions restart per document; target -100 has no loss. T
        may be 0, everything, backward included, works and every parameter still gets a (zero) gradient. attention:
        see `Attention`; called once per layer, in order, on every rank. Returns a float32 scalar (float64 for
        float64); `per_token=True`: [T] losses without gradient; no targets: [T, vocab].
        Errors: ValueError where the three differ in length, or attention returns another shape than the queries'.
        """
        if tokens_T.dim() != 1 or positions_T.shape != tokens_T.shape:
            raise ValueError(
                f"tokens have shape {tuple(tokens_T.shape)} and positions {tuple(positions_T.shape)}: both must be "
                "one-dimensional and equally long, this rank's rows of the packed sequence."
            )
        hidden_TC = self.model(tokens_T, positions_T, attention)
        chunks = self.config.loss_chunk_tokens, self.config.loss_chunk_vocab
        return self.lm_head(hidden_TC, targets_T, per_token, *chunks)


@torch.no_grad()
def initialise(
    model: Llama,
    seed: int,
    gathered: Callable[[nn.Parameter], AbstractContextManager[Any]] = lambda parameter: nullcontext(),
) -> None:
    """Draw every parameter from its own generator, seeded by `seed` and the parameter's name.

    Normal(0, init_std); the two projections that write to the residual stream (o_proj, down_proj) get init_std /
    sqrt(2 · num_layers) (GPT-2's rule: the stream's variance then doesn't grow with depth); norms are 1, biases 0.
    Drawn in float32 on the CPU and then rounded, so the result depends on neither device, dtype, world size nor the
    order of modules. Partitioned parameters:
    `gathered=lambda p: deepspeed.zero.GatheredParameters([p], modifier_rank=0)`.
    """
    for name, parameter in model.named_parameters():
        with gathered(parameter):
            parameter.copy_(initial(name, parameter.shape, model.config, seed))


def initial(name: str, shape: tuple[int, ...], config: ModelConfig, seed: int) -> Tensor:
    """What `initialise` makes of a parameter of that name and whole shape, in float32 on the CPU."""
    if name.endswith(VECTORS):
        return torch.full(shape, float(name.endswith("weight")))
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    residual_std = config.init_std / (2 * config.num_layers) ** 0.5
    std = residual_std if name.endswith(("o_proj.weight", "down_proj.weight")) else config.init_std
    return torch.empty(shape).normal_(0, std, generator=generator)


def shapes(config: ModelConfig) -> dict[str, nn.Parameter]:
    """Every parameter of a model by its name, on the meta device: shapes without memory. A tied head isn't one."""
    return dict(Llama(config, device="meta").named_parameters())


def build_model(config: ModelConfig, seed: int, dtype: torch.dtype = torch.float32, device: Any = None) -> Llama:
    """Make a decoder with weights that depend on the config and the seed alone."""
    model = Llama(config, device=device, dtype=dtype)
    initialise(model, seed)
    return model
