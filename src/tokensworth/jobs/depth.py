"""Depth models on images and data sets: prediction with the mirrored mean, and evaluation."""

from collections.abc import Callable

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from tokensworth.data.depth import DepthSet
from tokensworth.data.tensors import normalize
from tokensworth.dense.metrics import DepthErrors, depth_errors, mirrored_mean
from tokensworth.dense.model import DepthConfig, DepthModel
from tokensworth.errors import DataError


def depth_input(image: Image.Image, config: DepthConfig) -> Tensor:
    """An RGB image of any size as a depth model takes it: (3, H, W), normalized."""
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).unsqueeze(0)
    return normalize(pixels, config.mean, config.std)[0]


@torch.inference_mode()
def predict_depth(model: DepthModel, images: Tensor, mirrored: bool = True) -> Tensor:
    """Depth (B, 1, H, W) in metres of normalized images (B, 3, H, W).

    Args:
        model: in evaluation mode.
        images: anywhere; the answer is where the model is.
        mirrored: average with the prediction of the mirrored image, as the field evaluates; twice the work.
    """
    images = images.to(model.device)
    direct = model(images)
    return mirrored_mean(direct, model(images.flip(3))) if mirrored else direct


def depth_of_image(model: DepthModel, image: Image.Image, short: int = 0, mirrored: bool = False) -> np.ndarray:
    """Depth (H, W) in metres of one RGB image, at the image's own size.

    Args:
        model: in evaluation mode.
        image: any size.
        short: pixels of the shorter side as the model sees it; the image's own where 0.
        mirrored: as in `predict_depth`.
    """
    seen = image
    if short and short != min(image.size):
        scale = short / min(image.size)
        width, height = (max(1, round(side * scale)) for side in image.size)
        seen = image.resize((width, height), Image.Resampling.BICUBIC)
    depth = predict_depth(model, depth_input(seen, model.config).unsqueeze(0), mirrored)
    if depth.shape[2:] != (image.height, image.width):
        depth = F.interpolate(depth, (image.height, image.width), mode="bilinear", align_corners=False)
    return depth[0, 0].cpu().numpy()


def evaluate_depth(
    model: DepthModel,
    data: DepthSet,
    *,
    batch_size: int = 8,
    mirrored: bool = True,
    on_image: Callable[[int], None] = lambda _: None,
    on_problem: Callable[[str], None] = lambda _: None,
) -> list[DepthErrors | None]:
    """Errors of every image that can be read, in order; None where no pixel counts.

    Args:
        model: the model.
        data: images with depth, of sizes that may differ.
        batch_size: images of one size that run together.
        mirrored: as in `predict_depth`.
        on_image: told how many are done.
        on_problem: told of each file that cannot be used; the rest goes on.
    """
    model.eval()
    out: list[DepthErrors | None] = []
    waiting: list[tuple[Tensor, np.ndarray]] = []

    def flush() -> None:
        if not waiting:
            return
        predicted = predict_depth(model, torch.stack([image for image, _ in waiting]), mirrored).float().cpu()
        for (_, truth), depth in zip(waiting, predicted[:, 0], strict=True):
            judged = data.layout.judged(*truth.shape)
            farthest = min(data.layout.max_depth, model.config.max_depth)
            out.append(depth_errors(depth, torch.from_numpy(truth), farthest, judged=judged))
        waiting.clear()
        on_image(len(out))

    for index in range(len(data)):
        try:
            image, truth = data.read(index)
        except DataError as error:
            on_problem(str(error))
            continue
        if waiting and (waiting[0][1].shape != truth.shape or len(waiting) == batch_size):
            flush()
        waiting.append((depth_input(image, model.config), truth))
    flush()
    return out
