import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from tokensworth.cascade.resize import RowResize, side_matrix

grids = st.tuples(st.integers(1, 12), st.integers(1, 12)).filter(lambda g: g[0] < g[1])


@given(grids, st.integers(0, 2), st.integers(0, 2))
def test_rows_are_resized_as_the_released_code_does(pair, prefix, zeros):
    coarse, fine = pair
    maps = torch.randn(2, prefix + coarse**2, 3)
    got = RowResize(coarse, fine, prefix, zeros=zeros)(maps)
    assert torch.equal(got[:, :zeros], torch.zeros(2, zeros, 3))
    got = got[:, zeros:]
    grid = maps[:, prefix:].transpose(1, 2).unflatten(2, (coarse, coarse))
    wanted = F.adaptive_avg_pool2d(F.interpolate(grid, size=2 * coarse, mode="nearest"), fine)
    assert torch.allclose(got[:, prefix:], wanted.flatten(2).transpose(1, 2), atol=1e-5)
    assert torch.equal(got[:, :prefix], maps[:, :prefix])


@given(grids, st.integers(0, 2), st.integers(0, 1), st.booleans())
def test_gradients_are_those_of_the_matrix(pair, prefix, zeros, naive):
    coarse, fine = pair
    resize = RowResize(coarse, fine, prefix, naive, zeros)
    given_maps = torch.randn(3, prefix + coarse**2, 2)
    with torch.inference_mode():
        # What a batch made ready in inference serves a smaller one in training.
        matrix = resize(torch.eye(prefix + coarse**2).unsqueeze(0).expand(4, -1, -1))[0]
    matrix = matrix.clone()
    maps = given_maps.clone().requires_grad_()
    out = resize(maps)
    torch.testing.assert_close(out, matrix @ given_maps, atol=1e-5, rtol=1e-5)
    grad = torch.randn_like(out)
    out.backward(grad)
    torch.testing.assert_close(maps.grad, matrix.T @ grad, atol=1e-5, rtol=1e-5)


def test_a_constant_grid_stays_constant():
    assert torch.allclose(side_matrix(10, 14).sum(1), torch.ones(14))
