"""A DINOv2-small fine-tuned for saliency, and its head: patch tokens to a saliency map.

Weights: `scripts/convert_saliency.py`.
"""

from pathlib import Path
from typing import Any

import timm
from torch import Tensor, nn
from torch.nn import functional as F

from tokensworth.weights import read_weights

BACKBONE = "vit_small_patch14_dinov2"


class SaliencyHead(nn.Module):
    """Three transposed convolutions with norm and ReLU, then one channel: (B, 384, 16, 16) -> (B, 1, 128, 128)."""

    def __init__(self) -> None:
        super().__init__()
        widths = (384, 256, 128, 64)
        for i in range(3):
            self.add_module(f"upconv{i + 1}", nn.ConvTranspose2d(widths[i], widths[i + 1], 4, stride=2, padding=1))
            self.add_module(f"bn{i + 1}", nn.BatchNorm2d(widths[i + 1]))
        self.final_conv = nn.Conv2d(64, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(1, 4):
            x = F.relu(self.get_submodule(f"bn{i}")(self.get_submodule(f"upconv{i}")(x)))
        return self.final_conv(x)


class SaliencyModel(nn.Module):
    """Image (B, 3, S, S), ImageNet normalization, to its saliency (B, S, S) in [0, 1]."""

    def __init__(self, size: int = 224) -> None:
        super().__init__()
        self.backbone: Any = timm.create_model(BACKBONE, num_classes=0, img_size=size)
        self.decoder = SaliencyHead()

    @classmethod
    def load(cls, path: Path, size: int = 224) -> "SaliencyModel":
        """Reads the converted weights; the position embedding is resampled to the size."""
        from timm.layers.pos_embed import resample_abs_pos_embed

        weights = read_weights(path)
        model = cls(size)
        side = size // 14
        key = "backbone.pos_embed"
        tensors = {k: v.float() if v.is_floating_point() else v for k, v in weights.tensors.items()}
        tensors[key] = resample_abs_pos_embed(tensors[key], new_size=[side, side], num_prefix_tokens=1)
        counters = {k: v for k, v in model.state_dict().items() if k.endswith("num_batches_tracked")}
        type(weights)(counters | tensors, weights.source).copy_into(model)
        return model.eval()

    def features(self, image: Tensor) -> Tensor:
        """Patch tokens after the backbone's norm, (B, n, 384)."""
        return self.backbone.forward_features(image)[:, self.backbone.num_prefix_tokens :]

    def logits(self, features: Tensor, side: int) -> Tensor:
        """Patch tokens to saliency before the sigmoid, (B, side, side)."""
        grid = features.transpose(1, 2).unflatten(2, (int(features.shape[1] ** 0.5), -1))
        return F.interpolate(self.decoder(grid), size=(side, side), mode="bilinear", align_corners=False)[:, 0]

    def forward(self, image: Tensor) -> Tensor:
        return self.logits(self.features(image), image.shape[2]).sigmoid()
