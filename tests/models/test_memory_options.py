"""Ways of computing a model with less memory change neither its loss nor its gradients, and keep what they say."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from packed_oracle import oracle_logits, oracle_loss_sum, random_pack
from torch.utils._python_dispatch import TorchDispatchMode

import hsap
from hsap.models import ModelConfig, build_model

SHAPE = {
    "vocab_size": 61, "num_layers": 4, "hidden_dim": 24, "num_q_heads": 6, "num_kv_heads": 2, "head_dim": 4,
    "ffn_dim": 40, "init_std": 0.3, "loss_chunk_tokens": 16,
}  # fmt: skip
LENGTHS = [1, 13, 1, 1, 29, 6]
TOKENS = sum(LENGTHS)


@pytest.fixture(scope="module", autouse=True)
def world(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("world") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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


def planned(lengths=LENGTHS, dtype="fp64", num_rows=None, shape=SHAPE):
    """Attention by a plan on this one rank, and its kernel."""
    heads = hsap.HeadShape(shape["num_q_heads"], shape["num_kv_heads"], shape["head_dim"], dtype)
    session = hsap.Session(dtype={"fp64": torch.float64, "fp32": torch.float32}[dtype])
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
    """Bytes of the storages that operations have made and that are still there: now, and at most."""

    def __init__(self):
        super().__init__()
        self.alive, self.now, self.most = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage())
        return result

    def _see(self, storage):
        key = storage._cdata
        if key not in self.alive and storage.nbytes():
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
    with Peak() as peak:
        loss = model(tokens, positions, attention, targets)
        kept, forward = peak.now, peak.most
        peak.most = peak.now
        loss.backward()
    return kept, forward, peak.most
