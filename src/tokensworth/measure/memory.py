"""Peak memory of tensors while something runs."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Watch(TorchDispatchMode):
    """Adds up the storages that operations make and let go; inside an operation it does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: dict[int, weakref.ref] = {}

    def _forget(self, key: int, size: int) -> None:
        self.known.pop(key, None)
        self.live -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            key = id(storage)
            if key in self.known or key in before:
                continue
            size = storage.nbytes()
            self.known[key] = weakref.ref(storage, lambda _, k=key, s=size: self._forget(k, s))
            self.live += size
            self.peak = max(self.peak, self.live)
        return out


def peak_memory(run: Callable[[], Any], device: torch.device | None = None) -> int:
    """Most bytes of tensors alive at once that `run` made, besides what was there before.

    On a GPU the allocator's own count; on a CPU the outputs of all operations, without what an operation
    needs inside itself.
    """
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
        base = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - base
    watch = _Watch()
    with torch.no_grad(), watch:
        run()
    return watch.peak
