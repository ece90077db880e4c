import pytest
import torch

from tokensworth.errors import DataError
from tokensworth.tokens.statistics import token_statistics


def test_shares_and_jaccard_by_hand():
    salient = torch.tensor([[True, True, False, False, False]])
    kept = {
        2: torch.tensor([[True, True, True, True, False]]),
        4: torch.tensor([[True, False, False, True, True]]),
    }
    found = token_statistics(kept, salient)
    assert found.salient == {2: 1.0, 4: 0.5}
    assert found.background == {2: pytest.approx(2 / 3), 4: pytest.approx(2 / 3)}
    assert found.jaccard == {(2, 4): pytest.approx(1 / 3)}


def test_masks_that_do_not_fit_are_refused():
    with pytest.raises(DataError, match="shape"):
        token_statistics({2: torch.ones(1, 4, dtype=torch.bool)}, torch.ones(1, 5, dtype=torch.bool))
    with pytest.raises(DataError, match="background"):
        token_statistics({2: torch.ones(1, 5, dtype=torch.bool)}, torch.ones(1, 5, dtype=torch.bool))
