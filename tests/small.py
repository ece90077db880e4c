"""Small models and answers that many tests use."""

import numpy as np
import torch

from tokensworth.cascade import Cascade, CascadeConfig, Reuse
from tokensworth.exits.calibration import Calibration

SIZES = {"embed_dim": 32, "depth": 2, "num_heads": 2, "mlp_ratio": 2.0}


def small_config(grids=(3, 5, 8), classes=4, **options) -> CascadeConfig:
    options.setdefault("reuse", Reuse(hidden=16, width=8))
    return CascadeConfig("vit", grids, classes, image_size=32, stem="conv", backbone_args=SIZES, **options)


def randomize(model: torch.nn.Module, scale: float = 0.2) -> torch.nn.Module:
    """Gives every parameter a value that matters, zero-initialized ones too."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return model.eval()


def small_cascade(grids=(3, 5, 8), seed=0, **options) -> Cascade:
    torch.manual_seed(seed)
    model = Cascade(small_config(grids, **options))
    randomize(model)
    return model


def random_answers(count=300, stages=3, classes=5, seed=0, ties=False) -> Calibration:
    """Answers that get better from exit to exit; with `ties`, many equal scores."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, classes, count)
    difficulty = random.random(count)
    scores, predictions = [], []
    for stage in range(stages):
        chance = np.clip(1.1 - difficulty * (0.9 - 0.25 * stage), 0, 1)
        right = random.random(count) < chance
        predictions.append(np.where(right, labels, (labels + 1) % classes))
        score = np.clip(0.7 * chance + 0.3 * random.random(count), 0, 1)
        scores.append(np.round(score, 1) if ties else score)
    scored = np.stack(scores).astype(np.float32)
    costs = tuple(float(3**i) for i in range(stages))
    return Calibration(scored, scored, np.stack(predictions), labels, costs)
