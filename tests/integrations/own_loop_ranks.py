"""What ranks do in the tests of own loops; in a module of its own, which spawned processes can import."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from hsap import HeadShape, SequenceParallel

LENGTHS = [[40, 1, 23], [5, 1, 60, 9]]
Q_HEADS, KV_HEADS, HEAD_DIM, HIDDEN, LAYERS = 6, 2, 8, 16, 2
MASKS = ["window:7", "causal"]
SEED = 3


def tokens_of(lengths: list[int], seed: int) -> Tensor:
    return torch.randint(0, 50, (sum(lengths),), generator=torch.Generator().manual_seed(seed))


def weights() -> dict[str, Tensor]:
    """Of a decoder without norms and feed-forward layers, in float64."""
    generator = torch.Generator().manual_seed(SEED)

    def draw(*shape: int) -> Tensor:
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5
        return drawn.requires_grad_()

    made = {"embedding": draw(50, HIDDEN), "head": draw(50, HIDDEN)}
    for layer in range(LAYERS):
        made |= {f"{layer}.{name}": draw(heads * HEAD_DIM, HIDDEN) for name, heads in (("q", 6), ("k", 2), ("v", 2))}
        made[f"{layer}.o"] = draw(HIDDEN, Q_HEADS * HEAD_DIM)
    return made


def projected(w: dict[str, Tensor], x: Tensor, layer: int) -> list[Tensor]:
    return [(x @ w[f"{layer}.{name}"].T).unflatten(-1, (-1, HEAD_DIM)) for name in "qkv"]


def loss_sum(w: dict[str, Tensor], x: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(x @ w["head"].T, targets, ignore_index=-100, reduction="sum")


def expected() -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one process, document by document, with scores written out."""
    w = weights()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for i, lengths in enumerate(LENGTHS):
        for tokens in tokens_of(lengths, i).split(lengths):
            x, length = w["embedding"][tokens], len(tokens)
            distance = torch.arange(length)[:, None] - torch.arange(length)
            for layer in range(LAYERS):
                q, k, v = projected(w, x, layer)
                visible = (distance >= 0) & (distance < (7 if layer == 0 else length))
                k, v = (t.repeat_interleave(Q_HEADS // KV_HEADS, dim=1) for t in (k, v))
                scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
                scores = scores.masked_fill(~visible, float("-inf")).softmax(-1)
                x = x + torch.einsum("hqk,khd->qhd", scores, v).flatten(1) @ w[f"{layer}.o"].T
            total = total + loss_sum(w, x, F.pad(tokens[1:], (0, 1), value=-100))
            count += length - 1
    (total / count).backward()
    return (total / count).detach(), {name: tensor.grad for name, tensor in w.items()}


def heads(q: int = Q_HEADS, kv: int = KV_HEADS) -> HeadShape:
    return HeadShape(q, kv, HEAD_DIM, "fp64")


def averaged(w: dict[str, Tensor], loss: Tensor, group=None) -> tuple[Tensor, dict[str, Tensor]]:
    """What a wrapper that averages gradients makes of them, and the loss to be shown."""
    loss.backward()
    size = dist.get_world_size(group)
    mean = loss.detach() / size
    dist.all_reduce(mean, group=group)
    for tensor in w.values():
        if tensor.grad is None:
            tensor.grad = torch.zeros_like(tensor)
        dist.all_reduce(tensor.grad, group=group)
        tensor.grad /= size
    return mean, {name: tensor.grad for name, tensor in w.items()}


def data_parallel(rank: int, topology: str) -> tuple:
    """Each SP group has one of the two packs, or one group both."""
    sp = SequenceParallel(topology, heads(), MASKS, planner="auto" if topology == "2x2" else "sap")
    mine = list(range(len(LENGTHS)))[sp.dp_rank :: sp.dp_size]
    lengths = [length for i in mine for length in LENGTHS[i]]
    tokens = torch.cat([tokens_of(LENGTHS[i], i) for i in mine])
    sp.plan_ahead(lengths)
    shard = sp.load(lengths, tokens)
    w = weights()
    x = w["embedding"][shard.take(tokens)]
    for layer in range(LAYERS):
        o = shard.attention(*projected(w, x, layer), layer)
        x = x + o.flatten(1) @ w[f"{layer}.o"].T
    return averaged(w, loss_sum(w, x, shard.targets) * sp.loss_scale(shard.num_targets))


class _SumOverTensor(torch.autograd.Function):
    """Tensor parallelism's sum of partial products: the gradient of each part is that of the sum."""

    @staticmethod
    def forward(ctx, part: Tensor, group) -> Tensor:
        whole = part.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _IntoTensor(torch.autograd.Function):
    """Its counterpart: the same input on all tensor ranks, of which each gives a part of the gradient."""

    @staticmethod
    def forward(ctx, whole: Tensor, group) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


def tensor_parallel(rank: int) -> tuple:
    """Two ranks share the tokens, two the heads: an SP group for each tensor index, and plans of a share of heads."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sp", "tp"))
    tensor, group = mesh["tp"].get_group(), mesh["sp"].get_group()
    share = heads().shares(2)[mesh["tp"].get_local_rank()]
    sp = SequenceParallel("2x1", heads(share.q_count, share.kv_count), MASKS, group=group, average_over=group)
    lengths = [length for pack in LENGTHS for length in pack]
    tokens = torch.cat([tokens_of(pack, i) for i, pack in enumerate(LENGTHS)])
    shard = sp.load(lengths, tokens)
    w = weights()
    x = w["embedding"][shard.take(tokens)]
    q_columns = slice(share.q_first * HEAD_DIM, (share.q_first + share.q_count) * HEAD_DIM)
    for layer in range(LAYERS):
        q, k, v = projected(w, _IntoTensor.apply(x, tensor), layer)
        o = shard.attention(q[:, share.q], k[:, share.kv], v[:, share.kv], layer)
        x = x + _SumOverTensor.apply(o.flatten(1) @ w[f"{layer}.o"][:, q_columns].T, tensor)
    loss, gradients = averaged(w, loss_sum(w, x, shard.targets) * sp.loss_scale(shard.num_targets), group)
    # A tensor rank's weights outside of its share have no gradient; those of all shares make the whole.
    for name in gradients:
        if name[0].isdigit():
            dist.all_reduce(gradients[name], group=tensor)
    return loss, gradients


def pipeline_parallel(rank: int) -> tuple:
    """Two stages of a layer each, two ranks share the tokens; two micro-batches are under way at a time."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "sp"))
    stage, group = mesh["stage"].get_local_rank(), mesh["sp"].get_group()
    # The stage's own layer is its layer 0, with that layer's mask.
    sp = SequenceParallel("2x1", heads(), [MASKS[stage]], group=group, average_over=group)
    w = weights()
    shards = [sp.load(lengths, tokens_of(lengths, i)) for i, lengths in enumerate(LENGTHS)]
    scale = sp.loss_scale(sum(shard.num_targets for shard in shards))
    shown = torch.zeros((), dtype=torch.float64)
    stage_inputs, stage_outputs = [], []
    for i, shard in enumerate(shards):
        if stage == 0:
            x = w["embedding"][shard.take(tokens_of(LENGTHS[i], i))]
        else:
            x = torch.empty(shard.num_tokens, HIDDEN, dtype=torch.float64)
            dist.recv(x, rank - 2)
            x.requires_grad_()
        stage_inputs.append(x)
        o = shard.attention(*projected(w, x, stage))
        x = x + o.flatten(1) @ w[f"{stage}.o"].T
        stage_outputs.append(x)
        if stage == 0:
            dist.send(x.detach(), rank + 2)
    # Both forwards come before the first backward, and the first micro-batch's backward comes first.
    for i, shard in enumerate(shards):
        if stage == 1:
            loss = loss_sum(w, stage_outputs[i], shard.targets) * scale
            loss.backward()
            shown += loss.detach() / 2
            dist.send(stage_inputs[i].grad, rank - 2)
        else:
            gradient = torch.empty_like(stage_outputs[i])
            dist.recv(gradient, rank + 2)
            stage_outputs[i].backward(gradient)
    for tensor in w.values():
        tensor.grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        dist.all_reduce(tensor.grad)
        tensor.grad /= 2
    dist.all_reduce(shown)
    return shown, {name: tensor.grad for name, tensor in w.items()}


def disagreeing(rank: int) -> str:
    """One rank of a group loads other documents than the rank that plans: it is told so."""
    sp = SequenceParallel("4x1", heads())
    try:
        sp.load([7, 5] if rank == 2 else [7, 6])
    except ValueError as error:
        return str(error)
    return ""


def same_lengths(rank: int) -> str:
    """Ranks of a group load blocks of one length, each its own, as a loader that deals by rank gives them."""
    sp = SequenceParallel("4x1", heads())
    try:
        sp.load([5, 5], torch.arange(10) + rank)
    except ValueError as error:
        return str(error)
    return ""


def same_lengths_later(rank: int) -> str:
    """The third batch differs: it is told by the time of the fourth, and not before."""
    sp = SequenceParallel("4x1", heads())
    for number in range(3):
        sp.load([5, 5], torch.arange(10) + (rank if number == 2 else number))
    try:
        sp.load([5, 5], torch.arange(10))
    except ValueError as error:
        return str(error)
    return ""


def many_plans(rank: int) -> int:
    """More plans than are remembered, without any attention between them: ranks drift apart as far as they may."""
    sp = SequenceParallel("4x1", heads(), "causal", planner="zigzag", verify=False)
    for i in range(70):
        sp.load([1 + i, 3])
    sp.close()
    return len(sp._exchange._published)


def everything(rank: int) -> dict:
    """All of the above in one world; what torch can save."""
    return {
        "2x2": data_parallel(rank, "2x2"),
        "2x1": data_parallel(rank, "2x1"),
        "tensor": tensor_parallel(rank),
        "pipeline": pipeline_parallel(rank),
        "disagreeing": disagreeing(rank),
        "same lengths": same_lengths(rank),
        "same lengths later": same_lengths_later(rank),
        "many plans": many_plans(rank),
        "odd groups": odd_groups(rank),
    }


def odd_groups(rank: int) -> list[str]:
    """Groups that don't fit are refused on every rank."""
    told = []
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    uneven = dist.new_group([0, 1, 3])
    for topology, average in (("4x1", None), ("2x1", uneven)):
        if average is not None and rank == 2:
            continue  # it is no member
        try:
            SequenceParallel(topology, heads(), group=pair, average_over=average)
        except ValueError as error:
            told.append(str(error))
    return told
