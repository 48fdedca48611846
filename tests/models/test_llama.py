"""The decoder against a second implementation in float64, and what sequence parallelism needs of it."""

import dataclasses
import threading

import numpy as np
import pytest
import torch
from packed_oracle import dense_attention, document_of, oracle_logits, oracle_loss_sum, random_pack, visible_attention
from torch.utils._python_dispatch import TorchDispatchMode

from hsap.models import ModelConfig, build_model, initialise
from hsap.models.llama import RMSNorm
from hsap.models.rope import rope_tables

BASE = {"vocab_size": 61, "num_layers": 3, "hidden_dim": 20, "ffn_dim": 28, "init_std": 0.3, "loss_chunk_tokens": 8}
SHAPES = {
    "mha": {"num_q_heads": 4, "num_kv_heads": 4, "head_dim": 6},
    "gqa": {"num_q_heads": 9, "num_kv_heads": 3, "head_dim": 4, "rope_base": 100.0},
    "mqa": {"num_q_heads": 4, "num_kv_heads": 1, "head_dim": 2},
}
LENGTHS = [1, 13, 1, 1, 29, 6]


def config_of(shape="gqa", **change):
    return ModelConfig(**(BASE | SHAPES[shape] | change))


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def run(model, lengths=LENGTHS, attention=None, seed=0):
    tokens, positions, targets = random_pack(lengths, model.config.vocab_size, seed)
    model.zero_grad()
    loss = model(tokens, positions, attention or dense_attention(lengths), targets)
    loss.backward()
    return loss.item(), gradients(model)


def assert_gradients_close(actual, expected, bar=1e-10):
    assert actual.keys() == expected.keys()
    for name in expected:
        scale = expected[name].abs().max().clamp(min=1e-3)
        assert ((actual[name] - expected[name]).abs().max() / scale).item() < bar, name


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("lengths", [LENGTHS, [1], [40]], ids=["ragged", "one_token", "one_document"])
def test_equals_the_oracle(shape, tied, lengths):
    model = build_model(config_of(shape, tied_embeddings=tied), seed=1, dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.linspace(-0.5, 0.5, parameter.numel(), dtype=torch.float64))
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    tokens, positions, targets = random_pack(lengths, 61)
    targets[0] = 5
    expected_logits = oracle_logits(model.config, weights, tokens, lengths)
    expected_loss = oracle_loss_sum(expected_logits, targets)
    expected_loss.backward()

    logits = model(tokens, positions, dense_attention(lengths))
    torch.testing.assert_close(logits, expected_logits, rtol=1e-10, atol=1e-10)
    loss = model(tokens, positions, dense_attention(lengths), targets)
    loss.backward()
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-12)
    assert_gradients_close(gradients(model), {name: weight.grad for name, weight in weights.items()})

    losses = model(tokens, positions, dense_attention(lengths), targets, per_token=True)
    assert losses.shape == targets.shape and not losses[targets == -100].any()
    assert losses.sum().item() == pytest.approx(expected_loss.item(), rel=1e-12)


def test_parameter_names_are_hugging_face_llama_names():
    names = {name for name, _ in build_model(config_of(num_layers=1), seed=0).named_parameters()}
    layer = ["input_layernorm", "post_attention_layernorm"]
    layer += [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    outer = ["model.embed_tokens", "model.norm", "lm_head"]
    assert names == {f"{name}.weight" for name in outer + [f"model.layers.0.{name}" for name in layer]}
    assert "lm_head.weight" not in dict(build_model(config_of(tied_embeddings=True), seed=0).named_parameters())


@pytest.mark.parametrize(("dtype", "bar"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_narrow_dtypes_stay_near_float64(dtype, bar):
    narrow = build_model(config_of(init_std=0.1), seed=3, dtype=dtype)
    exact = build_model(config_of(init_std=0.1), seed=3, dtype=torch.float64)
    exact.load_state_dict(narrow.state_dict())
    loss, grads = run(narrow)
    exact_loss, exact_grads = run(exact)
    assert loss == pytest.approx(exact_loss, rel=bar)
    for name, exact_grad in exact_grads.items():
        assert grads[name].dtype == dtype
        assert ((grads[name].double() - exact_grad).norm() / exact_grad.norm()).item() < 5 * bar, name


def test_rope_is_exact_beyond_a_million():
    positions = torch.tensor([0, 1, 1_000_003, 4_194_301, 16_777_217], dtype=torch.int64)
    frequencies = np.longdouble(10000) ** (-np.arange(8) / np.longdouble(8))
    angles = positions.numpy().astype(np.longdouble)[:, None] * frequencies
    for dtype, bar in ((torch.float64, 1e-8), (torch.float32, 1e-7), (torch.bfloat16, 1e-7)):
        cos, sin = rope_tables(positions, 16, 10000.0, dtype)
        assert cos.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert np.abs(cos[:, 0].double().numpy() - np.cos(angles)).max() < bar
        assert np.abs(sin[:, 0].double().numpy() - np.sin(angles)).max() < bar


def test_only_distances_matter_to_rope():
    model = build_model(config_of(), seed=0, dtype=torch.float64)
    tokens, positions, targets = random_pack([31], 61)
    near = model(tokens, positions, dense_attention([31]), targets)
    far = model(tokens, positions + 3_000_000, dense_attention([31]), targets)
    assert far.item() == pytest.approx(near.item(), rel=1e-8)


def test_nothing_but_parameters_is_kept():
    """A buffer of rotary frequencies would be rounded by `module.bfloat16()`."""
    assert not list(build_model(config_of(), seed=0).buffers())


@pytest.mark.parametrize("size", [1e-4, 1.0, 3e4])
def test_norm_statistics_are_float32(size):
    x = (torch.randn(50, 333, generator=torch.Generator().manual_seed(0)) * size).bfloat16()
    norm = RMSNorm(333, 1e-5, dtype=torch.bfloat16)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    error = (norm(x).double() - exact).abs() / exact.abs().clamp(min=1e-30)
    assert error.max().item() <= 2**-8 * 1.001  # one rounding to eight significant bits


class CountedAttention:
    """Dense attention that counts its forwards and backwards per layer."""

    def __init__(self, lengths):
        self.dense, self.forwards, self.backwards = dense_attention(lengths), [], []

    def __call__(self, q, k, v, layer_index):
        self.forwards.append(layer_index)
        o = self.dense(q, k, v, layer_index)
        o.register_hook(lambda grad: self.backwards.append(layer_index))
        return o


@pytest.mark.parametrize("tied", [False, True])
def test_checkpointing_recomputes_all_but_attention(tied):
    results, calls = {}, {}
    for checkpointing in ("none", "selective"):
        model = build_model(config_of(checkpointing=checkpointing, tied_embeddings=tied), seed=2, dtype=torch.float64)
        count = calls[checkpointing] = {"q_proj": 0, "gate_proj": 0, "norm": 0}
        for name, module in model.named_modules():
            last = name.rpartition(".")[2]
            if last in count:
                module.register_forward_hook(lambda *_, last=last, count=count: count.update({last: count[last] + 1}))
        attention = CountedAttention(LENGTHS)
        results[checkpointing] = run(model, attention=attention)
        assert attention.forwards == [0, 1, 2] and attention.backwards == [2, 1, 0]
    assert calls == {
        "none": {"q_proj": 3, "gate_proj": 3, "norm": 1},
        "selective": {"q_proj": 6, "gate_proj": 6, "norm": 1},
    }
    assert results["selective"][0] == results["none"][0]
    assert_gradients_close(results["selective"][1], results["none"][1], 1e-15)


def test_checkpointing_keeps_only_what_attention_and_the_layer_borders_need():
    kept = {}
    for checkpointing in ("none", "selective"):
        model = build_model(config_of(checkpointing=checkpointing, num_layers=6), seed=2)
        tokens, positions, targets = random_pack(LENGTHS, 61)
        sizes = {}
        parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

        def pack(tensor, sizes=sizes, parameters=parameters):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(tokens, positions, lambda q, k, v, layer: q * 1, targets)
        kept[checkpointing] = sum(sizes.values())
        loss.backward()
    assert kept["selective"] < kept["none"] / 2


class LargestTensor(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_never_whole(tied):
    model = build_model(config_of(vocab_size=499, tied_embeddings=tied, checkpointing="selective"), seed=0)
    tokens, positions, targets = random_pack([90, 30], 499)

    def attention(q, k, v, layer):
        return q + (k + v).repeat_interleave(3, dim=1)

    with LargestTensor() as largest:
        model(tokens, positions, attention, targets).backward()
        model(tokens, positions, attention, targets, per_token=True)
    assert largest.elements == 499 * 20  # the head's weight: more than a chunk's logits, a sixth of the whole logits
    with LargestTensor() as largest:
        model(tokens, positions, attention)
    assert largest.elements == 499 * 120


@pytest.mark.parametrize("checkpointing", ["none", "selective"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_empty_shard(checkpointing, tied, dtype):
    model = build_model(config_of(checkpointing=checkpointing, tied_embeddings=tied), seed=0, dtype=dtype)
    empty = torch.zeros(0, dtype=torch.long)
    attention = CountedAttention([])
    loss = model(empty, empty, attention, empty)
    assert loss.shape == () and loss.item() == 0
    loss.backward()
    assert attention.forwards == [0, 1, 2] and attention.backwards == [2, 1, 0]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name
    assert model(empty, empty, dense_attention([])).shape == (0, 61)
    assert model(empty, empty, dense_attention([]), empty, per_token=True).shape == (0,)


def test_rows_without_targets_give_zero_gradients():
    model = build_model(config_of(), seed=0)
    tokens, positions, targets = random_pack([7, 2], 61, ignored=1.1)
    loss = model(tokens, positions, dense_attention([7, 2]), targets)
    loss.backward()
    assert loss.item() == 0
    assert not any(gradient.any() for gradient in gradients(model).values())


class GatheringRanks:
    """Runs one model on several shards in lockstep threads; attention sees the keys and values of all of them."""

    def __init__(self, shards, lengths):
        self.shards, self.barrier = shards, threading.Barrier(len(shards), timeout=20)
        self.document, self.posted = document_of(lengths), [None] * len(shards)

    def attention(self, rank):
        rows = self.shards[rank]

        def attend(q, k, v, layer_index):
            self.posted[rank] = (k, v)
            self.barrier.wait()
            k_all, v_all = (torch.cat(tensors) for tensors in zip(*self.posted))
            self.barrier.wait()
            columns = torch.cat(self.shards)
            visible = (self.document[rows][:, None] == self.document[columns]) & (rows[:, None] >= columns)
            return visible_attention(q, k_all, v_all, visible)

        return attend

    def losses(self, model, tokens, positions, targets):
        losses = [None] * len(self.shards)

        def rank_main(rank):
            rows = self.shards[rank]
            losses[rank] = model(tokens[rows], positions[rows], self.attention(rank), targets[rows])

        threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(len(self.shards))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return losses


@pytest.mark.parametrize("checkpointing", ["none", "selective"])
@pytest.mark.parametrize("sizes", [(17, 3, 31), (50, 0, 1)], ids=["uneven", "empty"])
@pytest.mark.parametrize("order", ["contiguous", "shuffled"])
def test_shards_add_up(checkpointing, sizes, order):
    model = build_model(config_of(checkpointing=checkpointing), seed=5, dtype=torch.float64)
    expected_loss, expected_grads = run(model)
    tokens, positions, targets = random_pack(LENGTHS, 61)
    rows = torch.arange(51) if order == "contiguous" else torch.randperm(51, generator=torch.Generator().manual_seed(0))
    ranks = GatheringRanks(torch.split(rows, list(sizes)), LENGTHS)
    model.zero_grad()
    losses = ranks.losses(model, tokens, positions, targets)
    sum(losses).backward()
    assert sum(losses).item() == pytest.approx(expected_loss, rel=1e-12)
    assert_gradients_close(gradients(model), expected_grads)


def test_initialisation_depends_on_seed_and_name_alone():
    config = config_of(num_layers=2, hidden_dim=64, init_std=0.02)
    torch.manual_seed(1)
    first = build_model(config, seed=7)
    torch.manual_seed(2)
    again = dict(build_model(config, seed=7).named_parameters())
    rounded = dict(build_model(config, seed=7, dtype=torch.bfloat16).named_parameters())
    other = dict(build_model(config, seed=8).named_parameters())
    deeper = dict(build_model(dataclasses.replace(config, num_layers=3), seed=7).named_parameters())
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, again[name])
        assert torch.equal(parameter.bfloat16(), rounded[name])
        if name.endswith("norm.weight"):
            assert (parameter == 1).all()
            continue
        assert not torch.equal(parameter, other[name])
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        assert parameter.std().item() == pytest.approx(0.02 / 2 if residual else 0.02, rel=0.1)
        assert residual or torch.equal(parameter, deeper[name])


def test_initialise_opens_every_parameter_before_writing():
    model, opened = build_model(config_of(), seed=0), []

    class Gathered:
        def __init__(self, parameter):
            self.parameter = parameter

        def __enter__(self):
            self.before = self.parameter._version
            opened.append(self.parameter)

        def __exit__(self, *_):
            assert self.parameter._version > self.before

    initialise(model, 1, gathered=Gathered)
    assert [id(parameter) for parameter in opened] == [id(parameter) for parameter in model.parameters()]


def test_bad_calls():
    model = build_model(config_of(), seed=0)
    tokens, positions, targets = random_pack([5], 61)
    with pytest.raises(ValueError, match="one-dimensional"):
        model(tokens[None], positions[None], dense_attention([5]), targets)
    with pytest.raises(ValueError, match="positions"):
        model(tokens, positions[:4], dense_attention([5]), targets)
    with pytest.raises(ValueError, match="one target for each"):
        model(tokens, positions, dense_attention([5]), targets[:4])
    with pytest.raises(ValueError, match="attention in layer 0 returned"):
        model(tokens, positions, lambda q, k, v, layer: k, targets)
