"""Pictures of the tokens that take part: chosen patches in colour, the others grey and pale."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

import tokensworth
from tokensworth.errors import MissingExtraError
from tokensworth.files import write_text
from tokensworth.jobs.showing import ShownImage, ShownLayer

_SIDE = 168


@dataclass(frozen=True)
class Panel:
    """One picture: its data URI and what it shows."""

    uri: str
    caption: str


@dataclass(frozen=True)
class PanelRow:
    """The panels of one image."""

    name: str
    panels: list[Panel]


def _uri(pixels: Tensor) -> str:
    array = (pixels.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _scaled(pixels: Tensor) -> Tensor:
    side = max(_SIDE, pixels.shape[1])
    return F.interpolate(pixels.unsqueeze(0), size=(side, side), mode="bilinear", align_corners=False)[0]


def _overlay(pixels: Tensor, layer: ShownLayer) -> Tensor:
    kept = torch.tensor(layer.kept + (False,) * (layer.grid[0] * layer.grid[1] - len(layer.kept)))
    mask = kept.float().view(1, 1, *layer.grid)
    shown = F.interpolate(mask, size=pixels.shape[1:], mode="nearest")[0]
    pale = 0.35 * pixels.mean(dim=0, keepdim=True).expand_as(pixels) + 0.6
    return torch.where(shown > 0, pixels, pale)


def panel_row(image: ShownImage) -> PanelRow:
    """The image itself, then one panel per ToSA layer."""
    pixels = _scaled(image.pixels)
    panels = [Panel(_uri(pixels), "image")]
    for layer in image.layers:
        caption = f"layer {layer.name}: {sum(layer.kept)} of {len(layer.kept)}"
        panels.append(Panel(_uri(_overlay(pixels, layer)), caption))
    return PanelRow(image.name, panels)


def write_tokens_page(images: Sequence[ShownImage], path: str | Path, title: str = "Tokens that take part") -> None:
    """Writes one self-contained page atomically.

    Raises:
        MissingExtraError: jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, PackageLoader, select_autoescape
    except ImportError:
        raise MissingExtraError("the page", "report") from None
    environment = Environment(loader=PackageLoader("tokensworth.report"), autoescape=select_autoescape())
    rows = [panel_row(image) for image in images]
    html = environment.get_template("tokens.html").render(title=title, version=tokensworth.__version__, images=rows)
    write_text(path, html)
