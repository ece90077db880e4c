"""Exact multiply-accumulates (MACs) of a model, fused attention included.

PyTorch's counter misses fused attention on a CPU and weighted sums of rows, by which grids are resized; two entries
mend that. Counted are products: linear layers, convolutions, matrix products, attention and those sums. Element-wise
work, norms and softmax are not, as in the papers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from torch.utils.module_tracker import ModuleTracker

from tokensworth.cascade import Cascade, CascadeConfig, Upstream
from tokensworth.cascade.shared import SharedStage
from tokensworth.cascade.stage import Stage
from tokensworth.tokens.method import at_most, dense
from tokensworth.tokens.vit import find_vits


def _fused_on_cpu(query: Any, key: Any, value: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _sums_of_rows(rows: Any, places: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return 2 * places[0] * rows[1]


_fused_on_cpu._get_raw = True  # type: ignore[attr-defined]  # tensors, not shapes: the counter's own switch


class _NoModules(ModuleTracker):
    """Counts are not told apart by module: following modules fails on a parameter that is a module's input."""

    def __enter__(self) -> "_NoModules":
        return self

    def __exit__(self, *_: Any) -> None:
        pass


def count_macs(run: Callable[[], Any]) -> int:
    """MACs of whatever `run` does."""
    aten = torch.ops.aten
    mapping = {
        aten._scaled_dot_product_flash_attention_for_cpu: _fused_on_cpu,
        aten._embedding_bag: _sums_of_rows,
        aten._embedding_bag_forward_only: _sums_of_rows,
    }
    counter = FlopCounterMode(display=False, custom_mapping=mapping)
    counter.mod_tracker = _NoModules()
    with torch.no_grad(), counter:
        run()
    return counter.get_total_flops() // 2


@dataclass(frozen=True)
class StageMacs:
    """MACs per image of one stage.

    Attributes:
        total: the whole stage, reuse included, as it runs.
        plain: the same backbone and grid without reuse.
        feature: context embeddings and their resizing.
        relation: transformation and resizing of the upstream stage's logits.
        saved: what a token method saves, selectors paid; less than 0 where they cost more than they save.
        wider: the widened MLPs, which is the rest.
    """

    total: int
    plain: int
    feature: int = 0
    relation: int = 0
    saved: int = 0

    @property
    def wider(self) -> int:
        return self.total + self.saved - self.plain - self.feature - self.relation


def input_shape(model: nn.Module, size: int | None = None) -> tuple[int, int, int]:
    """Channels, height and width (C, S, S) of the image that a cascade or a timm model takes.

    Args:
        model: the model.
        size: another side in pixels, for a model that takes several.
    """
    if isinstance(model, Cascade):
        channels, height = model.config.in_chans, model.config.image_size
        return channels, size or height, size or height
    vit: Any = find_vits(model)[0]
    height, width = (size, size) if size else vit.patch_embed.img_size
    stem = next(p for p in vit.patch_embed.parameters() if p.ndim == 4)
    return stem.shape[1], height, width


def model_macs(model: nn.Module, size: int, channels: int = 3) -> int:
    """MACs of one image of size x size pixels through any model."""
    parameter = next(model.parameters())
    image = torch.zeros(1, channels, size, size, device=parameter.device, dtype=parameter.dtype)
    was = model.training
    model.eval()
    try:
        return count_macs(lambda: model(image))
    finally:
        model.train(was)


def _plain(config: CascadeConfig, grid: int) -> int:
    return model_macs(Cascade(config.static(grid)), config.image_size, config.in_chans)


def stage_macs(cascade: Cascade) -> list[StageMacs]:
    """MACs per image of each stage, and of its reuse parts; with an adaptive keep ratio, the most it can cost.

    Leaving at exit k costs the sum of the stages up to k.
    """
    config = cascade.config
    parameter = next(cascade.parameters())
    shape = (1, config.in_chans, config.image_size, config.image_size)
    image = torch.zeros(shape, device=parameter.device, dtype=parameter.dtype)
    was = cascade.training
    cascade.eval()
    out: list[StageMacs] = []
    state: Upstream | None = None
    for index, grid in enumerate(config.grids):
        with at_most(cascade):
            total = count_macs(partial(cascade.run_stage, index, image, state))
        feature = relation = 0
        if state is not None:
            stage = cast(Stage | SharedStage, cascade.stages[index])
            feature = count_macs(partial(_all_contexts, stage, state.features))
            relation = count_macs(partial(_all_biases, stage, state))
        with dense(cascade):
            whole = count_macs(partial(cascade.run_stage, index, image, state)) if config.tokens else total
        out.append(StageMacs(total, _plain(config, grid), feature, relation, whole - total))
        with torch.no_grad():
            state = cascade.run_stage(index, image, state)[1]
    cascade.train(was)
    return out


def _all_contexts(stage: Stage | SharedStage, features: Tensor) -> None:
    if stage.feature is not None:
        for layer in range(stage.reusing):
            stage.feature(layer, features)


def _all_biases(stage: Stage | SharedStage, state: Upstream) -> None:
    prior = stage.prior(state)
    if prior is not None:
        for layer in range(stage.reusing):
            stage.reused(layer, prior)
