"""The sides of a comparison: a model with a token method, a trained model, a cascade under a policy."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from tokensworth.cascade import Cascade
from tokensworth.dense.model import DepthModel
from tokensworth.errors import UnsupportedModelError
from tokensworth.jobs.models import open_model
from tokensworth.tokens.method import Method, list_methods, method_class, method_from_dict, method_of
from tokensworth.tokens.vit import find_vits

# Policies of a cascade's frontier, evenly spread by cost from its cheapest to its dearest.
_POLICIES = 7


@dataclass(frozen=True)
class Side:
    """One way to run.

    Attributes:
        curve: the line it belongs to in a figure.
        setting: what tells it from the others of its line.
        source: the model, as `open_model` takes it.
        method: what the model is adapted with; None leaves it as it was saved.
        place: of a cascade with several exits, the place of its policy on its frontier, from 0 (cheapest) to 1.
    """

    curve: str
    setting: str
    source: str
    method: Method | None = None
    place: float | None = None


def parse_method(text: str, vit: nn.Module) -> list[Method]:
    """`tome` as its settings for a model, `tome:r=4` or `evit:keep=0.7;layers=4,7,10` as one.

    Raises:
        UnsupportedModelError: an unknown method or options that do not fit.
    """
    name, _, rest = text.partition(":")
    kind = method_class(name)
    if not rest:
        depth, patches = len(vit.blocks), vit.patch_embed.num_patches  # type: ignore[arg-type,union-attr]
        return kind.settings(depth, patches)  # type: ignore[arg-type]
    options = {}
    for pair in rest.split(";"):
        key, found, value = pair.partition("=")
        if not found:
            raise UnsupportedModelError(f"{text!r}: write options as name=value, several with ; between them")
        options[key] = _value(value, key == "layers")
    return [method_from_dict({"name": name, **options})]


def _value(text: str, several: bool) -> Any:
    def one(part: str) -> Any:
        try:
            return json.loads(part)
        except ValueError:
            return part

    parts = [one(part) for part in text.split(",")]
    return parts if several or len(parts) > 1 else parts[0]


def what_differs(method: Method) -> str:
    """Options that are not the class's own, for example `r=4`; the first option where all are."""
    own = type(method)().to_dict()
    values = method.to_dict()
    strength = next(name for name in ("keep", "r", *values) if name in values and name != "name")
    shown = [k for k in values if k == strength or (values[k] != own[k] and k != "layers")]
    return ", ".join(f"{k}={_short(values[k])}" for k in shown)


def _short(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def plan(model: str, methods: Sequence[str], trained: Sequence[str]) -> tuple[list[Side], list[str]]:
    """The sides of a comparison, the plain model first.

    Args:
        model: the plain model, as `open_model` takes it.
        methods: what to adapt it with, as `parse_method` reads it; `all` for every method.
        trained: saved models: plain, adapted, or cascades.

    Returns:
        The sides, and a line on each method that is left out because it must be trained first.

    Raises:
        UnsupportedModelError: `model` is itself adapted or has several exits.
    """
    opened = open_model(model, "cpu")
    if method_of(opened) is not None or (isinstance(opened, Cascade) and opened.num_stages > 1):
        raise UnsupportedModelError(f"{model} is no plain model; compare one, and give this one with --trained")
    vit = find_vits(opened)[0]
    sides, left_out = [Side("plain", "dense", model)], []
    for text in [n for m in methods for n in (list_methods() if m == "all" else [m])]:
        for method in parse_method(text, vit):
            method = _giving_back(method, opened)
            if isinstance(opened, DepthModel) and not method.keeps_grid:
                line = f"{method.name} loses tokens, which depth needs"
            elif method.needs_training:
                line = f"{method.name} must be trained first; give trained models with --trained"
            else:
                line = ""
                sides.append(Side(method.name, what_differs(method), model, method))
            if line and line not in left_out:
                left_out.append(line)
    for folder in trained:
        sides += _trained(folder)
    return sides, left_out


def _giving_back(method: Method, model: nn.Module) -> Method:
    """For dense prediction, a merging method in its form that gives merged tokens their places back."""
    if isinstance(model, DepthModel) and "unmerge" in method.to_dict():
        return method_from_dict({**method.to_dict(), "unmerge": True})
    return method


def _trained(folder: str) -> list[Side]:
    opened = open_model(folder, "cpu")
    method = method_of(opened)
    if isinstance(opened, Cascade) and opened.num_stages > 1:
        grids = "-".join(map(str, opened.config.grids))
        name = f"cascade {grids}" + (f", {method.name}" if method else "")
        places = [i / (_POLICIES - 1) for i in range(_POLICIES)]
        return [Side(name, f"policy {i + 1}", folder, None, place) for i, place in enumerate(places)]
    if method is not None:
        return [Side(f"{method.name}, tuned", what_differs(method), folder)]
    if isinstance(opened, Cascade):
        grid = opened.config.grids[0]
        return [Side("trained, plain", f"{Path(folder).name}, grid {grid}", folder)]
    return [Side("trained, plain", Path(folder).name, folder)]
