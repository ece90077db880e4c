"""Depth from one image: any timm vision transformer, adapted or not, and a decoder."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokensworth.dense.decoders import make_decoder
from tokensworth.errors import CheckpointError, UnsupportedModelError
from tokensworth.files import write_json
from tokensworth.tokens import storage
from tokensworth.tokens.grids import check_keeps_grid, tokens_after
from tokensworth.tokens.method import Method
from tokensworth.tokens.vit import ViT, find_vits
from tokensworth.weights import read_weights, write_weights

CONFIG_NAME, DECODER_NAME, ENCODER_NAME = "depth.json", "decoder.safetensors", "encoder"


@dataclass(frozen=True)
class DepthConfig:
    """What a depth model is, its encoder apart.

    Attributes:
        decoder: `newcrfs`, `dpt` or `linear`.
        widths: of the decoder's scales, fine to coarse.
        max_depth: metres; no prediction is greater.
        image_size: height and width in pixels that it was trained on; it takes any.
        mean, std: channel normalization of [0, 1] values.
    """

    decoder: str = "newcrfs"
    widths: tuple[int, ...] = (64, 96, 128, 192)
    max_depth: float = 10.0
    image_size: tuple[int, int] = (224, 224)
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        if self.max_depth <= 0 or min(self.image_size) < 1:
            raise UnsupportedModelError("the greatest depth and the image size must be positive")
        # JSON gives lists.
        for name in ("widths", "image_size", "mean", "std"):
            object.__setattr__(self, name, tuple(getattr(self, name)))


class DepthModel(nn.Module):
    """Metric depth of images of any size.

    Args:
        encoder: a timm `VisionTransformer` or `Eva` made with `dynamic_img_size=True`.
        config: the rest.

    Raises:
        UnsupportedModelError: another encoder, an unknown decoder, or widths that it cannot have.

    Example:
        >>> model = DepthModel.from_timm("vit_tiny_patch16_224", DepthConfig(), pretrained=False)
        >>> model(torch.zeros(1, 3, 97, 131)).shape
        torch.Size([1, 1, 97, 131])
    """

    def __init__(self, encoder: nn.Module, config: DepthConfig) -> None:
        super().__init__()
        vit = find_vits(encoder)[0]
        if vit is not encoder or not getattr(encoder, "dynamic_img_size", False):
            raise UnsupportedModelError(
                f"{type(encoder).__name__} as an encoder of any image size: make a timm VisionTransformer or Eva with "
                "dynamic_img_size=True"
            )
        self.config = config
        self.encoder: ViT = vit
        prefix: int = vit.num_prefix_tokens
        self.decoder = make_decoder(config.decoder, vit.embed_dim, prefix, config.widths, config.max_depth)
        self._layers = self.decoder.layers(len(vit.blocks))

    @classmethod
    def from_timm(cls, name: str, config: DepthConfig, *, pretrained: bool = True) -> "DepthModel":
        """With an encoder by its timm name, or from a folder that `save_pretrained` wrote.

        Args:
            name: timm name or folder.
            config: the rest.
            pretrained: with timm's weights; a folder's are always taken.

        Raises:
            UnsupportedModelError: timm cannot make it for any image size, or its weights cannot be had.
        """
        folder = Path(name).is_dir()
        options: dict[str, Any] = {"num_classes": 0, "img_size": config.image_size, "dynamic_img_size": True}
        try:
            encoder = timm.create_model(
                f"local-dir:{name}" if folder else name, pretrained=folder or pretrained, **options
            )
        except Exception as error:  # timm and the hub client raise many kinds
            reason = str(error).splitlines()[0]
            raise UnsupportedModelError(
                f"{name} as an encoder: timm cannot make it or has no weights ({reason})"
            ) from None
        return cls(encoder, config)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.parameters()).device

    def check_method(self, method: Method) -> None:
        """Refuses a token method that loses tokens; `adapt` asks."""
        check_keeps_grid(method)

    def forward(self, images: Tensor) -> Tensor:
        """Normalized images (B, 3, H, W), any H and W, to depth (B, 1, H, W) in metres."""
        height, width = images.shape[2:]
        down, right = self.encoder.patch_embed.patch_size  # type: ignore[misc]
        padded = F.pad(images, (0, -width % right, 0, -height % down), mode="replicate")  # type: ignore[operator]
        rows, columns = padded.shape[2] // down, padded.shape[3] // right  # type: ignore[operator]
        prefix = self.encoder.num_prefix_tokens
        tokens = tokens_after(self.encoder, padded, self._layers)
        # Decoders halve the grid once: an odd row or column is repeated, and cut off again.
        grids = [
            F.pad(
                t[:, prefix:].transpose(1, 2).unflatten(2, (rows, columns)),
                (0, columns % 2, 0, rows % 2),
                mode="replicate",
            )
            for t in tokens
        ]
        depth = self.decoder(grids, [t[:, :prefix] for t in tokens])
        scale = depth.shape[2] // grids[0].shape[2]
        depth = depth[:, :, : rows * scale, : columns * scale]
        depth = F.interpolate(depth, padded.shape[2:], mode="bilinear", align_corners=False)
        return depth[:, :, :height, :width]

    def save_pretrained(self, folder: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Saves the encoder as a timm folder with its token method, the decoder, and the configuration.

        Args:
            folder: made if missing.
            dtype: store floating-point weights in this type.
        """
        folder = Path(folder)
        options = {"num_classes": 0, "img_size": list(self.config.image_size), "dynamic_img_size": True}
        storage.save_pretrained(self.encoder, folder / ENCODER_NAME, dtype=dtype, model_args=options)
        write_weights(folder / DECODER_NAME, self.decoder.state_dict(), dtype)
        write_json(folder / CONFIG_NAME, asdict(self.config))

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "DepthModel":
        """Loads what `save_pretrained` wrote, in evaluation mode, adapted as it was.

        Raises:
            CheckpointError: missing, unreadable, or of another shape.
        """
        folder = Path(folder)
        try:
            config = DepthConfig(**json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{folder / CONFIG_NAME} is not a depth model's configuration ({error})") from None
        model = cls(storage.from_pretrained(folder / ENCODER_NAME), config)
        read_weights(folder / DECODER_NAME).copy_into(model.decoder)
        return model.eval()


def is_saved_depth(folder: Path) -> bool:
    """Whether a folder holds a depth model."""
    return (folder / CONFIG_NAME).is_file()
