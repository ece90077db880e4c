import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from tokensworth.cascade import resize
from tokensworth.cascade.resize import resize_rows, row_matrix, side_matrix

grids = st.tuples(st.integers(1, 12), st.integers(1, 12)).filter(lambda g: g[0] < g[1])


@given(grids, st.integers(0, 2), st.booleans())
def test_rows_are_resized_as_the_released_code_does(pair, prefix, small):
    coarse, fine = pair
    limit = resize._SMALL
    resize._SMALL = 10**9 if small else 0
    row_matrix.cache_clear()
    try:
        maps = torch.randn(2, prefix + coarse**2, 3)
        got = resize_rows(maps, row_matrix(coarse, fine), prefix)
    finally:
        resize._SMALL = limit
        row_matrix.cache_clear()
    grid = maps[:, prefix:].transpose(1, 2).unflatten(2, (coarse, coarse))
    wanted = F.adaptive_avg_pool2d(F.interpolate(grid, size=2 * coarse, mode="nearest"), fine)
    assert torch.allclose(got[:, prefix:], wanted.flatten(2).transpose(1, 2), atol=1e-5)
    assert torch.equal(got[:, :prefix], maps[:, :prefix])


def test_a_constant_grid_stays_constant():
    assert torch.allclose(side_matrix(10, 14).sum(1), torch.ones(14))
