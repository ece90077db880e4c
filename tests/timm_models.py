"""timm models that token methods are tried on: real architectures by name, no overrides but depth."""

import timm
import torch
from torch import Tensor, nn

# Models of the `VisionTransformer` and `Eva` families, and what each brings.
NAMES = {
    "vit_tiny_patch16_224": "class token",
    "vit_small_patch32_224": "49 patches",
    "vit_tiny_r_s16_p8_224": "convolutional stem",
    "vit_small_patch16_384": "576 patches",
    "deit_tiny_patch16_224": "class token",
    "deit_tiny_distilled_patch16_224": "class and distillation token, two heads",
    "deit3_small_patch16_224": "LayerScale",
    "vit_base_patch16_rpn_224": "norms after the residual branches, average pooling, no class token",
    "vit_small_patch14_dinov2": "LayerScale, 1369 patches",
    "vit_small_patch14_reg4_dinov2": "registers",
    "vit_small_patch16_dinov3": "rotary positions, registers",
    "vit_small_plus_patch16_dinov3": "rotary positions, SwiGLU",
    "vit_base_patch32_clip_224": "norm before the blocks",
    "vit_medium_patch32_clip_224": "norm before the blocks",
    "vit_base_patch16_clip_quickgelu_224": "another activation",
    "vit_base_patch16_siglip_224": "attention pooling, no class token",
    "vit_base_patch16_siglip_gap_224": "average pooling, no class token",
    "eva02_tiny_patch14_224": "rotary positions, SwiGLU",
    "eva02_tiny_patch14_336": "rotary positions, SwiGLU",
    "vit_small_patch16_rope_224": "rotary positions",
    "vit_small_patch16_rope_mixed_224": "rotary positions of each layer and head",
    "vit_pe_core_tiny_patch16_384": "rotary positions, attention pooling",
    "vit_medium_patch16_gap_256": "average pooling, no class token",
    "vit_wee_patch16_reg1_gap_256": "one register, average pooling",
    "vit_little_patch16_reg4_gap_256": "registers, average pooling",
    "vit_betwixt_patch16_reg4_gap_256": "registers, average pooling",
    "flexivit_small": "240 pixels",
    "test_vit": "tiny",
    "test_vit2": "tiny, LayerScale",
    "test_vit3": "tiny, attention pooling",
}


def make(name: str, depth: int = 4) -> nn.Module:
    """A model with random weights, in evaluation mode."""
    torch.manual_seed(0)
    return timm.create_model(name, depth=depth, num_classes=10).eval()


def images(model: nn.Module, count: int = 2) -> Tensor:
    """Random normalized images of the model's size (count, 3, S, S)."""
    size = model.pretrained_cfg["input_size"]
    return torch.randn(count, *size, generator=torch.Generator().manual_seed(1))
