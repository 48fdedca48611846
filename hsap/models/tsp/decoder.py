"""The decoder over weight shards: a `Llama` of which every rank holds 1/D, in rows of tokens and in weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hsap.models.config import ModelConfig
from hsap.models.llama import EMBEDDING, HEAD, NORM, rms_norm, shapes
from hsap.models.rope import model_rope
from hsap.models.tsp.attention import Projections, ShardAttention
from hsap.models.tsp.mlp import MLP
from hsap.models.tsp.rounds import Shapes, Transport
from hsap.models.tsp.shards import Part, WeightShards
from hsap.models.tsp.vocabulary import Vocabulary

ATTENTION = tuple(f"self_attn.{name}_proj.weight" for name in "qkvo")
BIASES = tuple(f"self_attn.{name}_proj.bias" for name in "qkv")
MLP_WEIGHTS = tuple(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down"))


def attention_names(config: ModelConfig) -> tuple[str, ...]:
    """The sharded parameters of a layer's attention, in the order of a bundle."""
    return ATTENTION + (BIASES if config.attention_bias != "none" else ())


class ShardedLlama(nn.Module):
    """A Llama whose parameters, under their usual names, are this rank's parts; `parts` says which.

    Gradients of sharded parameters come out summed over the ranks of the group, whose rows all count, and so do those
    of replicated ones: `_Replicated` adds them up once a backward pass, in one message. A rank's tokens are its own.
    source: gives a whole parameter by name; it is asked once for each, and the parts are copies.
    """

    def __init__(
        self,
        config: ModelConfig,
        transport: Transport,
        source: Callable[[str, tuple[int, ...]], Tensor],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.config, self.transport = config, transport
        self.shards = WeightShards(config, transport.degree)
        self._shapes = {name: tuple(p.shape) for name, p in shapes(config).items()}
        self.parts = {name: self.part(name, transport.index) for name in self._shapes}
        for name, part in self.parts.items():
            path, leaf = name.rsplit(".", 1)
            home: nn.Module = self
            for step in path.split("."):
                if step not in home._modules:
                    # Called with the hidden state behind what it names, for whoever watches modules.
                    home.add_module(step, nn.Identity())
                home = home.get_submodule(step)
            mine = part.take(source(name, part.whole)).to(device, dtype, copy=True).contiguous()
            home.register_parameter(leaf, nn.Parameter(mine))
        self.layers = [self._layer(index) for index in range(config.num_layers)]
        self.vocabulary = Vocabulary(
            transport, self.shards.vocabulary, self._bundles((EMBEDDING,)), config.loss_chunk_tokens
        )

    def part(self, name: str, index: int) -> Part:
        """What the rank with that index holds of a parameter."""
        return self.shards.part(name, self._shapes[name], index)

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attention: ShardAttention,
        targets_T: Tensor,
        per_token: bool = False,
    ) -> Tensor:
        """Sum of token losses over this rank's rows; the same arguments, and the same numbers, as `Llama.forward`.

        Collective over the group. What the loss is multiplied by before backward must be the same on all its ranks.
        per_token: every row's loss instead, without gradient.
        """
        config, parameters = self.config, dict(self.named_parameters())
        names = [name for name, part in self.parts.items() if part.axis is None]
        replicated = _Replicated.apply(self.transport, *(parameters[name] for name in names))
        parameters |= zip(names, replicated, strict=True)
        embedding, layers, norm = (self.get_submodule(f"model.{name}") for name in ("embed_tokens", "layers", "norm"))
        hidden_TC = embedding(self.vocabulary.embed(tokens_T, parameters[EMBEDDING]))
        rope = model_rope(config, positions_T, hidden_TC.dtype)
        norms = ("input_layernorm.weight", *(f"self_attn.{name}_norm.weight" for name in "qk" if config.qk_norm))
        for index, ((projections, mlp), behind) in enumerate(zip(self.layers, layers.children(), strict=True)):
            layer = f"model.layers.{index}."
            whole, sharded, ffn = (
                [parameters[layer + name] for name in wanted]
                for wanted in (norms, attention_names(config), ("post_attention_layernorm.weight", *MLP_WEIGHTS))
            )
            hidden_TC = projections(hidden_TC, rope, attention, whole, sharded)
            if config.attention_bias == "all":
                hidden_TC = hidden_TC + parameters[layer + "self_attn.o_proj.bias"]
            hidden_TC = behind(mlp(hidden_TC, *ffn))
        hidden_TC = norm(rms_norm(hidden_TC, parameters[NORM], config.norm_eps))
        head = parameters[EMBEDDING if config.tied_embeddings else HEAD]
        total, losses_T = self.vocabulary.losses(hidden_TC, head, targets_T)
        return losses_T if per_token else total

    def _layer(self, index: int) -> tuple[Projections, MLP]:
        prefix = f"model.layers.{index}."
        shapes = self._bundles(tuple(prefix + name for name in attention_names(self.config)))
        holders = self.parts[f"{prefix}self_attn.k_proj.weight"].holders
        mlp = MLP(self.transport, self._bundles(tuple(prefix + name for name in MLP_WEIGHTS)), self.config.norm_eps)
        return Projections(self.transport, self.config, shapes, holders, index), mlp

    def _bundles(self, names: tuple[str, ...]) -> list[Shapes]:
        """Shapes of those parameters in every shard."""
        return [tuple(self.part(name, i).shape for name in names) for i in range(self.transport.degree)]


class _Replicated(torch.autograd.Function):
    """Replicated parameters as they are; their gradients, each of this rank's rows, are added up over the group."""

    @staticmethod
    def forward(ctx: Any, transport: Transport, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.transport = transport
        ctx.set_materialize_grads(True)
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        total = flat.to(torch.promote_types(flat.dtype, torch.float32))
        ctx.transport.sum(total)
        parts = total.to(flat.dtype).split([gradient.numel() for gradient in gradients])
        return None, *(part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True))
