"""Any model that a command may be given, and images as that model wants them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import timm
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn

from tokensworth.cascade import Cascade
from tokensworth.data.packaged import packaged_folder
from tokensworth.data.sources import ImageSet
from tokensworth.data.tensors import normalize
from tokensworth.dense.model import DepthModel, is_saved_depth
from tokensworth.errors import UnsupportedModelError
from tokensworth.jobs.depth import depth_input
from tokensworth.run.inputs import make_transform
from tokensworth.tokens.storage import from_pretrained, is_saved_timm, save_pretrained


def open_model(name: str, device: str = "") -> nn.Module:
    """A saved cascade, depth model or timm model, `packaged`, or a timm model by name with pretrained weights.

    Args:
        name: folder, Hub repository or timm name.
        device: where to; what is available where empty.

    Raises:
        CheckpointError: a folder that holds none of them.
        UnsupportedModelError: weights that cannot be had.
    """
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    folder = packaged_folder() if name == "packaged" else Path(name)
    if folder.is_dir():
        if is_saved_depth(folder):
            return DepthModel.from_pretrained(folder).to(place)
        return (from_pretrained(folder) if is_saved_timm(folder) else Cascade.from_pretrained(folder)).to(place)
    if not timm.is_model(name):
        return Cascade.from_pretrained(name).to(place)
    try:
        return timm.create_model(name, pretrained=True).eval().to(place)
    except Exception as error:  # the hub client raises many kinds
        reason = str(error).splitlines()[0]
        raise UnsupportedModelError(f"{name}: its pretrained weights cannot be had ({reason})") from None


def save_model(model: nn.Module, folder: str | Path, dtype: torch.dtype | None = None) -> None:
    """Saves a cascade, a depth model or a timm model, with its token method, as `open_model` reads it."""
    if isinstance(model, (Cascade, DepthModel)):
        model.save_pretrained(folder, dtype=dtype)
    else:
        save_pretrained(model, folder, dtype=dtype)


def evaluation_transform(model: nn.Module) -> Callable[[Image.Image], Tensor]:
    """An RGB image to what a model takes: (C, S, S), normalized; of a depth model, of the size it was trained on."""
    if isinstance(model, DepthModel):
        shown, (height, width) = model.config, model.config.image_size
        return lambda image: depth_input(ImageOps.fit(image, (width, height)), shown)
    if isinstance(model, Cascade):
        config = model.config
        to_bytes = make_transform(config)
        return lambda image: normalize(to_bytes(image).unsqueeze(0), config.mean, config.std)[0]
    from timm.data.config import resolve_model_data_config
    from timm.data.transforms_factory import create_transform

    settings = resolve_model_data_config(model)
    size = model.patch_embed.img_size  # type: ignore[union-attr]
    if size:
        settings["input_size"] = (settings["input_size"][0], *size)  # type: ignore[misc]
    return create_transform(**settings, is_training=False)  # type: ignore[return-value]


class ImageBatches:
    """Labelled images as a model wants them, decoded anew at each pass.

    Args:
        images: the images.
        transform: of one image.
        batch_size: images per batch; the last may be smaller.
        keep: hold the decoded images in memory, for several passes over few images.
    """

    def __init__(
        self, images: ImageSet, transform: Callable[[Image.Image], Tensor], batch_size: int, keep: bool = False
    ) -> None:
        self.images, self.transform, self.batch_size = images, transform, batch_size
        self.kept: dict[int, Tensor] | None = {} if keep else None

    def __len__(self) -> int:
        return -(-len(self.images) // self.batch_size)

    def _one(self, index: int) -> Tensor:
        if self.kept is None:
            return self.transform(self.images.read(index))
        if index not in self.kept:
            self.kept[index] = self.transform(self.images.read(index))
        return self.kept[index]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        labels = torch.from_numpy(self.images.labels.copy())
        for start in range(0, len(self.images), self.batch_size):
            stop = min(start + self.batch_size, len(self.images))
            yield torch.stack([self._one(i) for i in range(start, stop)]), labels[start:stop]
