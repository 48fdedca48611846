"""Attention as models use it: the autograd function and the module, in a world of one process."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

import hsap
from hsap.runtime import machine
from hsap.runtime.kernels import row_delta
from tests.runtime.oracle import attention, tensors

LENGTHS = [5, 1, 17, 9]
HEADS = (4, 2, 8)


@pytest.fixture(scope="module", autouse=True)
def world(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("world") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_problem(dtype="fp32", masks=(("causal", 1),), lengths=LENGTHS):
    layout = hsap.Layout.from_lengths(lengths)
    parsed = tuple((hsap.Mask.parse(mask), layers) for mask, layers in masks)
    return hsap.Problem(layout, hsap.HeadShape(*HEADS, dtype), hsap.Topology(1, 1), parsed)


def make_inputs(problem, seed=0):
    """The leaves q, k, v and the gradient of o."""
    q, k, v, grad_o = tensors(problem, torch.float32, seed)
    return [t.requires_grad_() for t in (q, k, v)], grad_o


def make_module(problem, layer_masks=None):
    module = hsap.PlannedAttention(layer_masks)
    module.load(hsap.Session().load(hsap.compile(problem)))
    return module


def close(got, want):
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_outputs_and_gradients_are_those_of_the_definition():
    problem = make_problem()
    inputs, grad_o = make_inputs(problem)
    o = make_module(problem)(*inputs)
    o.backward(grad_o)
    want_o, _, *want_grads = attention(problem, *inputs, grad_o)
    close(o, want_o.detach())
    for leaf, want in zip(inputs, want_grads):
        close(leaf.grad, want)


def test_the_gradient_of_a_sum_has_rows_of_its_own_when_kernels_see_it(monkeypatch):
    """Autograd gives one number seen as many; a kernel that goes by the strides of rows would read beyond it."""
    seen = []
    monkeypatch.setattr(machine, "row_delta", lambda do, *rest: seen.append(do.is_contiguous()) or row_delta(do, *rest))
    problem = make_problem()
    inputs, grad_o = make_inputs(problem)
    make_module(problem)(*inputs).sum().backward()
    assert seen == [True]
    _, _, *want_grads = attention(problem, *inputs, torch.ones_like(grad_o))
    for leaf, want in zip(inputs, want_grads):
        close(leaf.grad, want)


def test_forwards_of_several_layers_may_all_come_before_the_first_backward():
    problem = make_problem()
    module = make_module(problem)
    layers = [make_inputs(problem, seed) for seed in range(3)]
    outputs = [module(*inputs) for inputs, _ in layers]
    for o, (_, grad_o) in zip(reversed(outputs), reversed(layers)):
        o.backward(grad_o)
    for o, (inputs, grad_o) in zip(outputs, layers):
        want_o, _, *want_grads = attention(problem, *inputs, grad_o)
        close(o, want_o.detach())
        for leaf, want in zip(inputs, want_grads):
            close(leaf.grad, want)


def test_a_layer_uses_its_own_mask():
    problem = make_problem(masks=(("causal", 2), ("full", 1)))
    module = make_module(problem, layer_masks=[0, 1, 0])
    inputs, grad_o = make_inputs(problem)
    for layer, mask in enumerate([0, 1, 0]):
        close(module(*inputs, layer), attention(problem, *inputs, grad_o, mask)[0].detach())


def test_nothing_is_kept_without_gradients():
    problem = make_problem()
    inputs, grad_o = make_inputs(problem)
    with torch.no_grad():
        o = make_module(problem)(*inputs)
    assert not o.requires_grad and o.grad_fn is None
    close(o, attention(problem, *inputs, grad_o)[0])


def test_a_plan_without_tokens_gives_empty_outputs_and_gradients():
    problem = make_problem(lengths=[])
    inputs, grad_o = make_inputs(problem)
    o = make_module(problem)(*inputs)
    o.backward(grad_o)
    assert o.shape == (0, 4, 8)
    assert [leaf.grad.shape for leaf in inputs] == [(0, 4, 8), (0, 2, 8), (0, 2, 8)]


def live_tensors():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def one_step(module, problem, alive):
    """A step as a model takes it: attention between other operations, so that its outputs have autograd nodes."""
    leaves, grad_o = make_inputs(problem)
    inputs = [leaf * 2 for leaf in leaves]
    o = module(*inputs)
    alive.extend(weakref.ref(t) for t in (*inputs, o, o.grad_fn))
    (o * grad_o).sum().backward()
    assert all(leaf.grad is not None for leaf in leaves)


def test_a_step_leaves_nothing_behind_though_the_module_stays():
    problem = make_problem()
    module, alive = make_module(problem), []
    # No help of the cycle collector: on a GPU it would come far too late.
    gc.collect()
    gc.disable()
    try:
        one_step(module, problem, alive)
        assert [ref() for ref in alive] == [None] * 5
    finally:
        gc.enable()
    before = live_tensors()
    for _ in range(5):
        one_step(module, problem, alive)
    assert live_tensors() <= before


def test_a_forward_without_backward_leaves_nothing_behind():
    problem = make_problem()
    module, alive = make_module(problem), []
    inputs, _ = make_inputs(problem)
    o = module(*inputs)
    alive = [weakref.ref(t) for t in (o, *inputs)]
    del o, inputs
    assert [ref() for ref in alive] == [None] * 4


def test_a_new_plan_lets_go_of_the_old_one():
    problem = make_problem()
    session, module = hsap.Session(), hsap.PlannedAttention()
    old = []
    for _ in range(3):
        executor = session.load(hsap.compile(problem))
        module.load(executor)
        one_step(module, problem, [])
        old.append(weakref.ref(executor))
    del executor
    gc.collect()
    assert [ref() is None for ref in old] == [True, True, False]


@pytest.mark.parametrize("num_rows", [31, 33, 0])
def test_rows_that_are_not_the_shard_are_refused(num_rows):
    module = make_module(make_problem())
    q, k = torch.zeros(num_rows, 4, 8), torch.zeros(num_rows, 2, 8)
    with pytest.raises(
        ValueError, match=rf"rank 0 was given q of shape \[{num_rows}, 4, 8\] .* its rows are \[32, 4, 8\]"
    ):
        module(q, k, k)


def test_a_plan_of_another_dtype_or_topology_is_refused():
    with pytest.raises(ValueError, match=r"the plan is for bf16, the session runs torch\.float32"):
        hsap.Session().load(hsap.compile(make_problem("bf16")))
    problem = hsap.Problem(hsap.Layout.from_lengths(LENGTHS), hsap.HeadShape(*HEADS, "fp32"), hsap.Topology(2, 1))
    with pytest.raises(ValueError, match=r"topology 2x1 \(2 ranks\), the process group has 1"):
        hsap.Session().load(hsap.compile(problem))


def test_a_module_without_a_plan_says_so():
    q, k = torch.zeros(1, 4, 8), torch.zeros(1, 2, 8)
    with pytest.raises(ValueError, match="no plan is loaded"):
        hsap.PlannedAttention()(q, k, k)
