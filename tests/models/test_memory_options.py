"""Ways of computing a model with less memory change neither its loss nor its gradients, and keep what they say."""

import functools
import gc
import weakref

import pytest
import torch
from packed_oracle import oracle_logits, oracle_loss_sum, random_pack
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

import hsap
from hsap.models import ModelConfig, build_model
from hsap.runtime.memory import TORCH_DTYPES

SHAPE = {
    "vocab_size": 61, "num_layers": 4, "hidden_dim": 24, "num_q_heads": 6, "num_kv_heads": 2, "head_dim": 4,
    "ffn_dim": 40, "init_std": 0.3, "loss_chunk_tokens": 16,
}  # fmt: skip
LENGTHS = [1, 13, 1, 1, 29, 6]
TOKENS = sum(LENGTHS)

pytestmark = pytest.mark.usefixtures("world")


class Counting:
    """A kernel that counts its calls."""

    def __init__(self, kernel):
        self.kernel, self.prepare, self.calls = kernel, kernel.prepare, {"forward": 0, "backward": 0}

    def attend(self, *arguments):
        self.calls["forward"] += 1
        self.kernel.attend(*arguments)

    def attend_grad(self, *arguments):
        self.calls["backward"] += 1
        self.kernel.attend_grad(*arguments)


def planned(lengths=LENGTHS, dtype="fp64", num_rows=None, shape=SHAPE, device="cpu"):
    """Attention by a plan on this one rank, and its kernel."""
    heads = hsap.HeadShape(shape["num_q_heads"], shape["num_kv_heads"], shape["head_dim"], dtype)
    session = hsap.Session(device=device, dtype=TORCH_DTYPES[dtype])
    kernel = session._kernels[shape["head_dim"]] = Counting(session.kernel(shape["head_dim"]))
    attention = hsap.PlannedAttention()
    problem = hsap.Problem(hsap.Layout.from_lengths(lengths), heads, hsap.Topology(1, 1))
    attention.load(session.load(hsap.compile(problem)), num_rows)
    return attention, kernel


def model_of(dtype=torch.float64, **change):
    return build_model(ModelConfig(**(SHAPE | change)), seed=1, dtype=dtype)


def run(model, attention, lengths=LENGTHS, padding=0):
    tokens, positions, targets = random_pack(lengths, model.config.vocab_size)
    fill = (0, padding)
    pad = torch.nn.functional.pad
    loss = model(pad(tokens, fill), pad(positions, fill), attention, pad(targets, fill, value=-100))
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_close(got, want, bar):
    assert got[0] == pytest.approx(want[0], rel=bar, abs=0)
    for name, gradient in want[1].items():
        scale = gradient.abs().max().clamp(min=1e-3)
        assert ((got[1][name] - gradient).abs().max() / scale).item() <= bar, name


def test_checkpointing_attends_once_and_changes_no_bit():
    want = run(model_of(), planned()[0])
    for checkpointing in ("none", "selective", "full"):
        attention, kernel = planned()
        assert_close(run(model_of(checkpointing=checkpointing), attention), want, 0)
        assert kernel.calls == {"forward": 4, "backward": 4}


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize(("mlp_rows", "vocab"), [(7, 10), (1, 61), (52, 1), (1000, 60)])
@pytest.mark.parametrize("tied", [False, True])
def test_all_together_equal_the_oracle(checkpointing, mlp_rows, vocab, tied):
    ways = {"mlp_chunk_tokens": mlp_rows, "loss_chunk_vocab": vocab, "checkpointing": checkpointing}
    model = model_of(tied_embeddings=tied, **ways)
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    tokens, positions, targets = random_pack(LENGTHS, 61)
    loss = oracle_loss_sum(oracle_logits(model.config, weights, tokens, LENGTHS), targets)
    loss.backward()
    want = loss.item(), {name: weight.grad for name, weight in weights.items()}
    assert_close(run(model, planned()[0]), want, 1e-10)
    assert_close(
        run(model_of(tied_embeddings=tied, **ways), planned()[0]),
        run(model_of(tied_embeddings=tied), planned()[0]),
        1e-12,
    )
    losses = model(tokens, positions, planned()[0], targets, per_token=True)
    assert losses.sum().item() == pytest.approx(loss.item(), rel=1e-12)


@pytest.mark.parametrize("lengths", [[], [1]])
def test_empty_and_single_rows(lengths):
    for checkpointing in ("selective", "full"):
        ways = {"mlp_chunk_tokens": 3, "loss_chunk_vocab": 7, "checkpointing": checkpointing}
        loss, gradients = run(model_of(**ways), planned(lengths)[0], lengths)
        assert_close((loss, gradients), run(model_of(), planned(lengths)[0], lengths), 1e-12)
        assert all(gradient is not None for gradient in gradients.values())


class Peak(TorchDispatchMode):
    """Bytes of the storages that operations have made and that are still there: now, and at most. The model's own
    don't count."""

    def __init__(self, model):
        super().__init__()
        self.alive, self.now, self.most = {}, 0, 0
        self.own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage())
        return result

    def _see(self, storage):
        key = storage._cdata
        if key not in self.own and key not in self.alive and storage.nbytes():
            self.alive[key] = size = storage.nbytes()
            weakref.finalize(storage, self._gone, key, size)
            self.now += size
            self.most = max(self.most, self.now)

    def _gone(self, key, size):
        del self.alive[key]
        self.now -= size


def peaks(model, attention, lengths):
    """Bytes made and still there: (at the end of forward, at most in forward, at most in backward)."""
    tokens, positions, targets = random_pack(lengths, model.config.vocab_size)
    gc.collect()
    with Peak(model) as peak:
        loss = model(tokens, positions, attention, targets)
        kept, forward = peak.now, peak.most
        peak.most = peak.now
        loss.backward()
    return kept, forward, peak.most


def saved_per_row(**ways):
    """Bytes that each of the inner layers keeps from forward to backward, a row: float32, by counting storages."""
    lengths, kept = [40, 24], []
    for layers in (2, 5):
        attention, _ = planned(lengths, "fp32")
        kept.append(peaks(model_of(torch.float32, num_layers=layers, **ways), attention, lengths)[0])
    return (kept[1] - kept[0]) / 3 / 64


def test_what_each_way_keeps_by_hand():
    hidden, q, kv, ffn, heads = 24, 24, 8, 40, 6
    attention = 4 * (2 * q + 2 * kv + heads)
    # A norm: its scale, its input times the scale, and that times its weight; the input itself is the residual stream.
    norms = 2 * 4 * (hidden + 1 + hidden + hidden)
    assert saved_per_row() == attention + norms + 4 * 4 * ffn
    assert saved_per_row(mlp_chunk_tokens=16) == attention + norms
    assert saved_per_row(checkpointing="selective") == attention + 4 * hidden
    assert saved_per_row(checkpointing="full") == 4 * (q + heads) + 4 * hidden
    assert saved_per_row(checkpointing="full", mlp_chunk_tokens=16) == 4 * (q + heads) + 4 * hidden


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_backward_lets_go_of_what_layers_kept(checkpointing):
    """When it comes to the first layer, nothing but gradients of weights is left of those above."""
    left, tokens = [], random_pack([300, 212], 61)
    for layers in (3, 6):
        model, attention = (
            model_of(torch.float32, checkpointing=checkpointing, num_layers=layers),
            planned([300, 212], "fp32")[0],
        )
        with Peak(model) as peak:
            loss = model(*tokens[:2], attention, tokens[2])
            first = model.model.layers[0].post_attention_layernorm
            first.weight.register_hook(lambda _, peak=peak: left.append(peak.now))
            loss.backward()
    weights = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    assert abs(left[1] - left[0] - 3 * weights) < 512 * 4 * 6


def test_chunks_bound_the_feed_forward_and_the_logits():
    lengths = [700, 324]
    shape = SHAPE | {"ffn_dim": 640, "vocab_size": 3000, "num_layers": 1, "loss_chunk_tokens": 512}

    def most(**ways):
        model = build_model(ModelConfig(**(shape | ways)), seed=1, dtype=torch.float32)
        return peaks(model, planned(lengths, "fp32", shape=shape)[0], lengths)

    whole, tiled, both = (
        most(**ways) for ways in ({}, {"mlp_chunk_tokens": 64}, {"mlp_chunk_tokens": 64, "loss_chunk_vocab": 300})
    )
    # Four tensors of ffn_dim are kept of every row, else none.
    assert whole[0] - tiled[0] == 4 * 4 * 640 * 1024
    # Logits and log-probabilities of 512 rows were the peak of forward: 3,000 words of both, then 300 of three.
    assert tiled[1] - both[1] > 4 * 512 * (2 * 3000 - 3 * 300)
    # Six chunks of the feed-forward at most in backward, beside what is there anyway.
    assert both[2] - both[0] < 4 * (6 * 64 * 640 + 2 * 3 * 24 * 640 + 8 * 24 * 1024 + 2 * 3000 * 24)
    assert whole[2] - whole[0] > 4 * 640 * 1024


@pytest.mark.parametrize("padding", [0, 1, 13])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_padding_changes_no_gradient(padding, checkpointing):
    want = run(model_of(), planned()[0])
    padded = planned(num_rows=TOKENS + padding)[0]
    ways = {"checkpointing": checkpointing, "mlp_chunk_tokens": 10}
    assert_close(run(model_of(**ways), padded, padding=padding), want, 1e-12)
    # A rank without any row of its own.
    loss, gradients = run(model_of(**ways), planned([], num_rows=padding)[0], [], padding)
    assert loss == 0 and not any(gradient.any() for gradient in gradients.values())


def test_rows_that_were_not_announced_are_refused():
    with pytest.raises(ValueError, match=r"rank 0 has 51 rows, which don't go into num_rows=50"):
        planned(num_rows=TOKENS - 1)
    with pytest.raises(ValueError, match=r"was given 52 rows, load\(\) was told of 54, 51 of its own"):
        run(model_of(), planned(num_rows=TOKENS + 3)[0], padding=1)


def test_full_checkpointing_says_what_attention_it_takes():
    with pytest.raises(ValueError, match=r"function has no `keeping` and `resumed`: .* model\.checkpointing=selective"):
        run(model_of(checkpointing="full"), lambda q, k, v, layer: q)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_compiled_parts_compile_once_for_all_layers_and_steps(checkpointing, monkeypatch):
    """Packs of several sizes, padded to one: two graphs, of what is before and behind attention."""
    backend = CompileCounter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    model = model_of(checkpointing=checkpointing, mlp_chunk_tokens=20, compile=True)
    plain = model_of(checkpointing=checkpointing, mlp_chunk_tokens=20)
    for lengths in (LENGTHS, [30, 17], [60], [1]):
        rows = 64 - sum(lengths)
        got, want = (run(each, planned(lengths, num_rows=64)[0], lengths, rows) for each in (model, plain))
        assert_close(got, want, 1e-12)
        model.zero_grad(), plain.zero_grad()
    assert backend.frame_count == 2, backend.frame_count
