"""A layer's layout is right if signals and inputs give back autograd's own weight gradient: G = sum of delta h^T."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mukron.layers import MatrixLayer, conv, layer_of

CASES = {
    "linear": (nn.Linear(5, 4), (3, 5)),
    "linear, sequence": (nn.Linear(5, 4), (3, 6, 5)),
    "linear, two leading dimensions": (nn.Linear(5, 4), (3, 6, 2, 5)),
    "linear, one sample": (nn.Linear(5, 4), (5,)),
    "conv1d": (nn.Conv1d(4, 6, 3), (2, 4, 9)),
    "conv1d, stride and dilation": (nn.Conv1d(4, 6, 3, stride=2, dilation=2, padding=1), (2, 4, 12)),
    "conv2d": (nn.Conv2d(4, 6, 3), (2, 4, 7, 8)),
    "conv2d, odd kernel": (nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2)), (2, 4, 9, 8)),
    "conv2d, same": (nn.Conv2d(4, 6, (3, 4), padding="same"), (2, 4, 7, 8)),
    "conv2d, circular": (nn.Conv2d(4, 6, 3, padding=2, padding_mode="circular"), (2, 4, 7, 8)),
    "conv2d, reflect": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (2, 4, 7, 8)),
    "conv2d, groups": (nn.Conv2d(4, 6, 3, groups=2, padding=1), (2, 4, 7, 8)),
    "conv2d, depthwise": (nn.Conv2d(4, 8, 3, groups=4), (2, 4, 7, 8)),
    "conv2d, not batched": (nn.Conv2d(4, 6, 3), (4, 7, 8)),
    "conv3d": (nn.Conv3d(2, 4, 2, stride=2, padding=1), (2, 2, 4, 5, 6)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("name", CASES)
def test_signals_and_inputs_give_the_gradient(name):
    torch.manual_seed(0)
    module, shape = CASES[name]
    module = module.double()
    module.zero_grad()
    x = torch.randn(shape, dtype=torch.float64)
    output = module(x)
    output.retain_grad()
    output.square().sum().backward()
    view = layer_of(module)
    H, D = view.inputs(x), view.signals(output.grad)
    assert H.shape[0] == D.shape[0] == view.groups
    assert H.shape[1:3] == D.shape[1:3]
    assert (H.shape[3], D.shape[3]) == (view.d_in, view.d_out)
    G = torch.einsum("gnpo,gnpi->goi", D, H)
    assert torch.allclose(view.weight(G), module.weight.grad, rtol=1e-10)
    assert torch.equal(view.weight(view.matrix(module.weight)), module.weight)
    assert torch.allclose(D.sum((1, 2)).flatten(), module.bias.grad, rtol=1e-10)


SLIDING = {
    "conv1d": (nn.Conv1d(4, 6, 3, padding=1), (2, 4, 12)),
    "conv2d": (nn.Conv2d(4, 6, 3, padding=1), (3, 4, 9, 5)),
    "conv2d, wide padding": (nn.Conv2d(4, 6, 3, padding=4), (3, 4, 9, 5)),
    "conv2d, other axis": (nn.Conv2d(4, 6, (5, 2), stride=(1, 2), padding=(2, 0), dilation=(1, 3)), (2, 4, 15, 9)),
    "conv2d, same": (nn.Conv2d(4, 6, (4, 3), padding="same"), (2, 4, 13, 8)),
    "conv2d, circular": (nn.Conv2d(4, 6, 3, padding=2, padding_mode="circular"), (2, 4, 9, 8)),
    "conv2d, groups": (nn.Conv2d(4, 6, 3, groups=2, padding=1), (2, 4, 9, 8)),
    "conv2d, not batched": (nn.Conv2d(4, 6, 3, padding=1), (4, 9, 8)),
    "conv3d": (nn.Conv3d(2, 4, 2, padding=1), (2, 2, 6, 5, 4)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("portion", [2**24, 700])
@pytest.mark.parametrize("name", [*CASES, *(f"sliding {name}" for name in SLIDING)])
def test_sums_over_rows_that_are_never_held_together(name, portion, monkeypatch):
    """The Gram matrix of a layer's inputs, and what they do to a vector, are those of its rows."""
    monkeypatch.setattr(conv, "PORTION", portion)
    torch.manual_seed(0)
    slides = name.startswith("sliding ")
    module, shape = SLIDING[name.removeprefix("sliding ")] if slides else CASES[name]
    view, x = layer_of(module), torch.randn(shape, dtype=torch.float64)
    if slides:
        assert view._slides(x)
    H = view.inputs(x).flatten(1, 2)
    assert H.shape[1] == view.row_count(x)
    expected = H.mT @ H
    assert (view.gram(x) - expected).norm() <= 1e-14 * expected.norm()
    v = torch.randn(view.d_in, 1, dtype=torch.float64)
    assert torch.allclose(view.along(x, v), H @ v, rtol=1e-12, atol=1e-12)


BRIGHT = {
    "conv1d": (nn.Conv1d(8, 4, 3), (32, 8, 24)),
    "conv2d": (nn.Conv2d(4, 6, 3), (16, 4, 16, 16)),
    "conv2d, kernel 5": (nn.Conv2d(3, 6, (5, 2)), (16, 3, 20, 9)),
    "conv2d, padding": (nn.Conv2d(4, 6, 3, padding=1), (16, 4, 16, 16)),
    "conv2d, groups": (nn.Conv2d(6, 6, 3, groups=2), (16, 6, 16, 16)),
    "conv3d": (nn.Conv3d(2, 4, 3), (8, 2, 10, 5, 5)),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("brightness", [1e3, 1e4])
@pytest.mark.parametrize("name", BRIGHT)
def test_gram_matrix_stays_accurate_with_bright_borders(name, brightness, seed):
    """Border lines far larger than the interior: every entry keeps the precision of an ordinary product."""
    torch.manual_seed(seed)
    module, shape = BRIGHT[name]
    x = torch.randn(shape)
    x[:, :, 0] *= brightness
    x[:, :, -1] *= brightness
    view = layer_of(module)
    assert view._slides(x)
    A = view.gram(x)
    H = view.inputs(x.double()).flatten(1, 2)
    exact = H.mT @ H
    # the error of a sum of products h_a h_b is bounded by sum |h_a h_b| <= (A_aa A_bb)^1/2
    scale = exact.diagonal(dim1=1, dim2=2).sqrt()
    normalized = (A.double() - exact) / (scale.unsqueeze(1) * scale.unsqueeze(2))
    assert normalized.abs().max() <= 1e-5
    eigenvalues, expected = torch.linalg.eigvalsh(A.double()), torch.linalg.eigvalsh(exact)
    assert (eigenvalues[:, 0] >= -1e-5 * eigenvalues[:, -1]).all()
    assert torch.allclose(eigenvalues[:, -1], expected[:, -1], rtol=1e-5)
    assert torch.allclose(eigenvalues[:, 0], expected[:, 0], rtol=0.05)  # 1e-8 to 1e-5 of the largest


@pytest.mark.parametrize("shape", [(3,), (3, 6)])
def test_embedding(shape):
    module = nn.Embedding(7, 4)
    x = torch.randint(7, shape)
    output = module(x)
    output.retain_grad()
    output.square().sum().backward()
    view = layer_of(module)
    H = torch.nn.functional.one_hot(view.inputs(x), 7).float()
    v = torch.randn(7, 1)
    assert torch.equal(view.along(x, v), H.flatten(1, 2) @ v)
    G = torch.einsum("gnpo,gnpi->goi", view.signals(output.grad), H)
    assert torch.allclose(view.weight(G), module.weight.grad)
    assert torch.equal(view.weight(view.matrix(module.weight)), module.weight)


def test_other_modules_have_no_layout():
    assert not isinstance(layer_of(nn.LayerNorm(3)), MatrixLayer)
    assert not isinstance(layer_of(nn.ConvTranspose2d(2, 2, 2)), MatrixLayer)
