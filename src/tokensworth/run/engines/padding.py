"""Batches of a few sizes: an engine that prepares itself for each new size meets only these."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# What an engine does with dense tensors, batch first.
Call = Callable[[Sequence[Tensor]], list[Tensor]]


def padded_size(count: int) -> int:
    """The least power of two, or three times one, that is at least `count`: at most a third is filler."""
    size = 1 << (count - 1).bit_length()
    return 3 * size // 4 if size >= 4 and 3 * size // 4 >= count else size


def run_padded(call: Call, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Calls with every input filled up by zeros to `padded_size`, and cuts what comes back."""
    count = len(inputs[0])
    size = padded_size(count)
    if size == count:
        return call(inputs)
    filled = [torch.cat([x, x.new_zeros(size - count, *x.shape[1:])]) for x in inputs]
    return [out[:count] for out in call(filled)]
