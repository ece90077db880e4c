"""Fitting whatever a token method learns without labels, in one call for any method."""

from collections.abc import Callable, Iterable, Sized
from typing import Any, Protocol

from torch import nn

from tokensworth.tokens.method import Method, method_of
from tokensworth.tokens.methods.vtc_lfc import VTCLFC
from tokensworth.train.channels import prune_channels
from tokensworth.train.selectors import SelectorRecipe, fit_selectors
from tokensworth.train.star import fit_star


class Batches(Iterable[Any], Sized, Protocol):
    """Batches of images, or of images and labels, for several passes."""


def _fit_tosa(model: nn.Module, batches: Batches) -> None:
    fit_selectors(model, batches, recipe=SelectorRecipe(epochs=4))


def _fit_star(model: nn.Module, batches: Batches) -> None:
    fit_star(model, batches)


def _fit_channels(model: nn.Module, batches: Batches) -> None:
    method = method_of(model)
    if isinstance(method, VTCLFC) and method.channels < 1 and not method.hidden:
        prune_channels(model, batches, method.channels)


_FITTING: dict[str, Callable[[nn.Module, Batches], None]] = {
    "tosa": _fit_tosa,
    "star": _fit_star,
    "vtc_lfc": _fit_channels,
}


def can_fit(method: Method) -> bool:
    """Whether a method learns something without labels, under its options."""
    return method.name in _FITTING and not (isinstance(method, VTCLFC) and method.channels == 1)


def fit_unlabelled(model: nn.Module, batches: Batches) -> None:
    """Fits an adapted model's method on images; nothing to do for most methods."""
    method = method_of(model)
    if method is not None and can_fit(method):
        _FITTING[method.name](model, batches)
