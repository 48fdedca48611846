"""Activations: what `hsap.models.llama` holds of a rank's rows, counted tensor by tensor.

C hidden width, F the feed-forward's, V words, e bytes of an activation; statistics, sums and residuals' squares are in
fp32 (`WIDE`). All figures are bytes per row unless they say otherwise.
"""

from __future__ import annotations

from hsap.ir.heads import DTYPE_BYTES
from hsap.models.config import ModelConfig

WIDE = 4


def saved_bytes(model: ModelConfig, dtype: str, checkpointing: str, kept_copies: float = 1.0) -> tuple[float, float]:
    """Bytes per row that one layer saves for backward: (by attention, by all the rest).

    kept_copies: copies of KV heads that IntraSP keeps (1 where ranks share out the KV heads). Attention saves q, kv, o
    and lse. The rest, without checkpointing: both norms save their input and their scaled input in fp32 and the scale,
    products save their inputs (o is attention's), SiLU its own. With it, the layer's input; `full` makes q and kv
    again as well.
    """
    e, lse = DTYPE_BYTES[dtype], WIDE * model.num_q_heads
    if checkpointing == "full":
        return e * model.q_dim + lse, e * model.hidden_dim
    attention = e * (2 * model.q_dim + 2 * model.kv_dim * kept_copies) + lse
    if checkpointing == "selective":
        return attention, e * model.hidden_dim
    # In chunks the feed-forward keeps its input alone, which is the norm's output.
    rest = 2 * _norm_bytes(model, dtype) + (4 * e * model.ffn_dim if model.mlp_chunk_tokens is None else 0)
    if model.qk_norm:
        rest += 2 * WIDE * (model.q_dim + model.kv_dim) + WIDE * (model.num_q_heads + model.num_kv_heads)
    return attention, rest


def _norm_bytes(model: ModelConfig, dtype: str) -> int:
    # Widening is no copy in fp32: what the norm multiplies by its weight is still a tensor of its own.
    return 2 * WIDE * model.hidden_dim + DTYPE_BYTES[dtype] * model.hidden_dim + WIDE


def working_bytes(model: ModelConfig, dtype: str, checkpointing: str, tokens: int, kept_copies: float = 1.0) -> float:
    """Bytes that backward of one layer needs beside what was saved, of so many rows.

    The product of gate and up has two gradients, and one comes in for the residual stream; a norm's backward has five
    tensors in fp32. With checkpointing what the layer behind attention saves is made again, and under `full` what is
    before it too. In chunks the feed-forward has five tensors of a chunk, and gradients of its weights in fp32.
    """
    e, hidden, ffn = DTYPE_BYTES[dtype], model.hidden_dim, model.ffn_dim
    again = checkpointing != "none"
    norm = 5 * WIDE * hidden
    if model.mlp_chunk_tokens is None:
        rows = max(e * ((6 if again else 2) * ffn + hidden) + again * 3 * WIDE * hidden, norm)
        chunk = 0
    else:
        rows = norm + again * 2 * WIDE * hidden
        chunk = 5 * e * ffn * min(model.mlp_chunk_tokens, tokens) + 3 * WIDE * hidden * ffn
    if checkpointing == "full":
        rows += _norm_bytes(model, dtype) + e * (model.q_dim + 2 * model.kv_dim * kept_copies)
    return rows * tokens + chunk


def last_norm_bytes(model: ModelConfig, dtype: str) -> int:
    """Bytes per row that the norm behind the layers saves, and its output."""
    return _norm_bytes(model, dtype)


def loss_bytes(model: ModelConfig, dtype: str, tokens: int) -> float:
    """Bytes of the loss in forward: gradients of hidden states and of the head in fp32, and logits of a chunk of rows.

    A chunk exists as logits, as log-probabilities in fp32 (half precision: and as logits in fp32), as their gradient in
    the logits' dtype; those of the chunk before are alive while it begins. Beside the gradient of half-precision logits
    there is the product that is added to the head's, and widened for that.
    """
    e, hidden = DTYPE_BYTES[dtype], model.hidden_dim
    rows = min(tokens, model.loss_chunk_tokens)
    words = min(model.vocab_size, model.loss_chunk_vocab or model.vocab_size)
    kept = WIDE * (tokens + model.vocab_size) * hidden
    half, again = e < WIDE, tokens > rows or words < model.vocab_size
    logits = (e + 2 * WIDE if half else 2 * WIDE) + (again and WIDE + (e if half else 0))
    adding = (WIDE + e) * rows * words + (WIDE + e) * words * hidden if half else 0
    return kept + max(logits * rows * words, adding)


def loss_gradient_bytes(model: ModelConfig, dtype: str, tokens: int) -> float:
    """Bytes of the loss in backward: both gradients as they were kept, scaled, and the larger one in half precision."""
    e, hidden = DTYPE_BYTES[dtype], model.hidden_dim
    half = e if e < WIDE else 0
    return ((2 * WIDE + half) * model.vocab_size + (WIDE + e) * tokens) * hidden
