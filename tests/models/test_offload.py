"""What layers keep leaves for the host in order, comes back one layer ahead of its use, and is what it was."""

import pytest
import torch
from packed_oracle import dense_attention, random_pack
from test_memory_options import LENGTHS, assert_close, model_of, planned, run

from hsap.models.offload import CudaMover, Shelf

E, TOKENS, HIDDEN, Q, KV, HEADS = 8, sum(LENGTHS), 24, 24, 8, 6
KEPT = {
    "selective": [HIDDEN * E, Q * E, 2 * KV * E, Q * E, HEADS * 8],  # hidden, q, kv, o, lse
    "full": [Q * E, HEADS * 8, HIDDEN * E],
}
"""Bytes a row that a layer keeps: float64."""

pytestmark = pytest.mark.usefixtures("world")


class Watched:
    """A mover on the CPU whose copies are only there once they are waited for; says what it did, in order."""

    def __init__(self):
        self.told = []

    def leave(self, there):
        host = torch.full_like(there, 0xFF)  # NaN, if it is read too early
        self.told.append(("leave", there.numel()))
        return host, (host, there)

    def come(self, host):
        there = torch.full_like(host, 0xFF)
        self.told.append(("come", host.numel()))
        return there, (there, host)

    def wait(self, copy):
        target, source = copy
        target.copy_(source)
        self.told.append(("wait", target.numel()))


class Layers:
    """Attention that tells the mover's list when a layer's attention ran forward and backward."""

    def __init__(self, attention, told):
        self.attention, self.told = attention, told

    def __call__(self, q, k, v, layer_index):
        return self._tell(self.attention(q, k, v, layer_index), layer_index)

    def keeping(self, q, k, v, layer_index):
        o, kept = self.attention.keeping(q, k, v, layer_index)
        return self._tell(o, layer_index), kept

    def resumed(self, q, k, v, kept):
        return self.attention.resumed(q, k, v, kept)

    def _tell(self, o, layer_index):
        self.told.append(("forward", layer_index))
        o.register_hook(lambda _: self.told.append(("backward", layer_index)))
        return o


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
@pytest.mark.parametrize("num_layers", [1, 2, 4])
def test_gradients_are_those_without_to_the_last_bit(checkpointing, num_layers):
    ways = {"checkpointing": checkpointing, "num_layers": num_layers}
    model = model_of(offload_checkpoints=True, **ways)
    model.model.mover = Watched()
    assert_close(run(model, planned()[0]), run(model_of(**ways), planned()[0]), 0)
    assert len(model.model.mover.told) == (num_layers - 1) * 4 * len(KEPT[checkpointing])


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_a_layer_s_tensors_come_while_the_one_above_goes_backward(checkpointing):
    model = model_of(offload_checkpoints=True, checkpointing=checkpointing, num_layers=4)
    mover = model.model.mover = Watched()
    run(model, Layers(planned()[0], mover.told))
    assert sorted(n // TOKENS for what, n in mover.told if what == "leave") == sorted(3 * KEPT[checkpointing])
    order = [at if what == "backward" else what for what, at in mover.told if what in ("come", "backward")]
    assert [at for i, at in enumerate(order) if i == 0 or order[i - 1] != at] == ["come", 3, "come", 2, "come", 1, 0]


def test_copies_are_started_and_waited_for_in_order():
    mover = Watched()
    shared = torch.arange(5.0)
    shelf, kept, want = Shelf(mover, 3, [shared]), [], []
    for layer in range(3):
        with shelf.layer(layer):
            matrix = torch.arange(12.0).view(3, 4) + layer
            views = [matrix[1:, ::2], matrix.t(), shared[1:], torch.zeros(0, 4)]
            want += [views] if layer else [[*views, torch.ones(layer + 7, dtype=torch.int8)]]
            kept += [[shelf.put(view) for view in want[layer]]]
    assert mover.told == [("leave", 48), ("leave", 7), ("leave", 48), ("wait", 48), ("wait", 7), ("wait", 48)]
    mover.told.clear()
    for layer, told in (
        (2, [("come", 48)]),
        (1, [("wait", 48), ("come", 48), ("come", 7)]),
        (0, [("wait", 48), ("wait", 7)]),
    ):
        for view, handle in zip(want[layer], kept[layer]):
            got = shelf.get(handle)
            assert torch.equal(got, view) and got.stride() == view.stride()
        assert mover.told == told
        mover.told.clear()
    assert kept[0][2] is want[0][2] and kept[0][3] is want[0][3]
    assert all(item.there is None for item in shelf.items[1].values())
    # A second backward of the same forward asks for everything once more.
    assert torch.equal(shelf.get(kept[1][0]), want[1][0]) and mover.told[:2] == [("come", 48), ("wait", 48)]


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_every_copy_is_waited_for_before_its_memory_is_let_go(checkpointing):
    """Also of layers that no backward reaches, as their weights are frozen, or that no backward is asked of."""
    model = model_of(offload_checkpoints=True, checkpointing=checkpointing, num_layers=4)
    mover = model.model.mover = Watched()
    tokens, positions, targets = random_pack(LENGTHS, 61)
    loss = model(tokens, positions, planned()[0], targets)
    torch.autograd.grad(loss, model.model.layers[2].mlp.down_proj.weight)
    del loss
    told = [what for what, _ in mover.told]
    assert told.count("wait") == told.count("leave") + told.count("come") and told.count("come")
    model(tokens, positions, planned()[0], targets)
    assert [what for what, _ in mover.told[len(told) :]].count("come") == 0
    model.requires_grad_(False).model.layers[2:].requires_grad_(True)
    run_frozen = model(tokens, positions, planned()[0], targets)
    run_frozen.backward()
    del run_frozen
    told = [what for what, _ in mover.told]
    assert told.count("wait") == told.count("leave") + told.count("come")


def test_evaluation_moves_nothing():
    model = model_of(offload_checkpoints=True, checkpointing="full")
    model.model.mover = Watched()
    with torch.no_grad():
        tokens = torch.zeros(TOKENS, dtype=torch.long)
        model(tokens, tokens, dense_attention(LENGTHS), tokens)
    assert model.model.mover.told == []


def test_on_a_cpu_it_is_refused():
    model = model_of(offload_checkpoints=True, checkpointing="selective")
    with pytest.raises(ValueError, match=r"offload_checkpoints=true moves .* the model is on cpu: .* leave it off"):
        run(model, planned()[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_on_a_gpu_two_layers_remain_however_many_there_are(checkpointing):
    rows, most, results = 20_000, {}, {}
    shape = {"hidden_dim": 256, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "ffn_dim": 512, "init_std": 0.02}
    attention = planned([rows], "bf16", shape=shape, device="cuda")[0]
    tokens, positions, targets = (tensor.cuda() for tensor in random_pack([rows], 61))
    for layers, offload in ((4, False), (4, True), (8, False), (8, True)):
        ways = {"checkpointing": checkpointing, "num_layers": layers, "offload_checkpoints": offload, **shape}
        model = model_of(torch.bfloat16, **ways).cuda()
        torch.cuda.reset_peak_memory_stats()
        loss = model(tokens, positions, attention, targets)
        loss.backward()
        most[layers, offload] = torch.cuda.max_memory_allocated()
        results[offload] = loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}
        assert isinstance(model.model.mover, CudaMover) == offload
        del model, loss
    # Backward of attention adds up in no fixed order there.
    assert_close(results[True], results[False], 2e-2)
    kept = 2 * (256 + 256) + 4 * 4 + (2 * (256 + 256) if checkpointing == "selective" else 0)
    assert most[8, False] - most[4, False] > 0.9 * 4 * kept * rows
    assert most[8, True] - most[4, True] < 0.3 * 4 * kept * rows
