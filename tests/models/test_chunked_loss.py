"""The chunked loss against cross-entropy over whole float64 logits."""

import pytest
import torch
import torch.nn.functional as F

import hsap.models.loss
from hsap.models import token_loss_sum, token_losses

VOCAB, DIM = 37, 12


def inputs(num_rows, dtype=torch.float64, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    hidden = (torch.randn(num_rows, DIM, generator=generator, dtype=torch.float64) * scale).to(dtype)
    weight = torch.randn(VOCAB, DIM, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, VOCAB, (num_rows,), generator=generator)
    targets[torch.rand(num_rows, generator=generator) < 0.3] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def whole(hidden, weight, targets, factor=1.0):
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    loss = F.cross_entropy(hidden @ weight.T, targets.long(), ignore_index=-100, reduction="sum")
    (loss * factor).backward()
    return loss.item(), hidden.grad, weight.grad


def relative(value, exact):
    return ((value.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("num_rows", [1, 2, 29, 64])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 29, 1000])
@pytest.mark.parametrize("target_dtype", [torch.int64, torch.int32])
def test_loss_and_gradients_equal_whole_logits(num_rows, chunk_tokens, target_dtype):
    hidden, weight, targets = inputs(num_rows)
    targets[0] = 3
    loss = token_loss_sum(hidden, weight, targets.to(target_dtype), chunk_tokens)
    (loss * 0.37).backward()
    exact, grad_hidden, grad_weight = whole(hidden, weight, targets, 0.37)
    assert loss.dtype == torch.float64 and loss.shape == ()
    assert loss.item() == pytest.approx(exact, rel=1e-13)
    torch.testing.assert_close(hidden.grad, grad_hidden, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(weight.grad, grad_weight, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(("dtype", "loss_bar", "grad_bar"), [(torch.float32, 1e-6, 1e-6), (torch.bfloat16, 4e-3, 1e-2)])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_narrow_dtypes_stay_near_float64(dtype, loss_bar, grad_bar, scale):
    hidden, weight, targets = inputs(200, dtype, scale=scale)
    loss = token_loss_sum(hidden, weight, targets, 16)
    loss.backward()
    exact, grad_hidden, grad_weight = whole(hidden, weight, targets)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact, rel=loss_bar)
    assert hidden.grad.dtype == weight.grad.dtype == dtype
    assert relative(hidden.grad, grad_hidden) < grad_bar * scale
    assert relative(weight.grad, grad_weight) < grad_bar * scale


def test_bfloat16_weight_gradient_does_not_lose_small_chunks():
    """Summing the chunks' weight gradients in bfloat16 would stall: 4,096 equal rows, one row a chunk."""
    hidden = torch.ones(4096, DIM, dtype=torch.bfloat16).requires_grad_()
    weight = torch.zeros(VOCAB, DIM, dtype=torch.bfloat16).requires_grad_()
    targets = torch.zeros(4096, dtype=torch.long)
    token_loss_sum(hidden, weight, targets, 1).backward()
    _, _, exact = whole(hidden, weight, targets)
    assert relative(weight.grad, exact) < 4e-3


@pytest.mark.parametrize("num_rows", [0, 5])
def test_without_targets_the_loss_is_zero_and_connected(num_rows):
    hidden, weight, _ = inputs(num_rows)
    loss = token_loss_sum(hidden, weight, torch.full((num_rows,), -100), 2)
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad.shape == hidden.shape and not hidden.grad.any()
    assert weight.grad.shape == weight.shape and not weight.grad.any()


def test_infinite_logits_in_ignored_rows_do_not_leak():
    hidden, weight, targets = inputs(6)
    with torch.no_grad():
        hidden[2] = float("nan")
    targets[:] = torch.tensor([1, 2, -100, 3, 4, 5])
    loss = token_loss_sum(hidden, weight, targets, 4)
    loss.backward()
    assert torch.isfinite(loss) and not hidden.grad[2].any()


def test_per_token_losses():
    hidden, weight, targets = inputs(23)
    losses = token_losses(hidden, weight, targets, 5)
    exact = F.cross_entropy(hidden @ weight.T, targets, ignore_index=-100, reduction="none")
    torch.testing.assert_close(losses, exact.detach(), rtol=1e-12, atol=1e-13)
    assert not losses.requires_grad
    assert token_losses(hidden[:0], weight, targets[:0], 5).shape == (0,)


def test_evaluation_makes_no_gradients():
    hidden, weight, targets = inputs(23)
    with torch.no_grad():
        loss = token_loss_sum(hidden, weight, targets, 5)
    assert not loss.requires_grad
    assert loss.item() == pytest.approx(whole(hidden, weight, targets)[0], rel=1e-13)


def test_wrong_number_of_targets():
    hidden, weight, targets = inputs(8)
    with pytest.raises(ValueError, match="8 rows"):
        token_loss_sum(hidden, weight, targets[:7], 4)
    with pytest.raises(ValueError, match="8 rows"):
        token_losses(hidden, weight, targets[:7], 4)


@pytest.mark.parametrize("target", [-1, -101, VOCAB])
@pytest.mark.parametrize("chunk_vocab", [None, 5])
def test_a_target_that_is_no_word_is_refused(target, chunk_vocab):
    hidden, weight, targets = inputs(9)
    targets[4] = target
    for loss in (token_loss_sum, token_losses):
        with pytest.raises(ValueError, match=f"target of row 4 is {target}: give a word of the vocabulary, 0 to 36"):
            loss(hidden, weight, targets, 4, chunk_vocab)


@pytest.mark.parametrize("target", [-1, VOCAB])
def test_where_targets_are_not_looked_at_it_makes_the_loss_nan(target, monkeypatch):
    monkeypatch.setattr(hsap.models.loss, "check_targets", lambda *_: None)
    hidden, weight, targets = inputs(9)
    targets[4] = target
    assert token_loss_sum(hidden, weight, targets, 4, 5).isnan()
    assert token_losses(hidden, weight, targets, 4, 5).isnan().nonzero().tolist() == [[4]]
