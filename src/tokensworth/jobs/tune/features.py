"""What passes over the images bring: features for heads, tokens for the last layers, answers of every exit."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokensworth.cascade import Cascade
from tokensworth.cascade.heads import features_of
from tokensworth.cascade.shared import SharedStage
from tokensworth.data.sources import ImageSet
from tokensworth.jobs.answers import labelled_batches
from tokensworth.jobs.tune.chunks import Chunks

_BATCH = 100


class Passes:
    """Kept passes over images under one precision.

    Args:
        folder: where to keep what they bring.
        dtype: autocast to this type; None for none.
    """

    def __init__(self, folder: Path, dtype: torch.dtype | None) -> None:
        self.folder, self.dtype = folder, dtype

    def features(self, cascade: Cascade, images: ImageSet, source: str) -> Chunks:
        """What the classifier of each grid reads, (N, D) float32, by the grid's number.

        Args:
            cascade: all candidate grids, without reuse.
            images: the images.
            source: hash of the pretrained model; heads do not matter.
        """

        def one(stage: SharedStage, batch: Tensor) -> Tensor:
            return features_of(stage.vit, stage.vit.norm(stage.tokens_before(batch, stage.layers))).float()

        return self._by_grid("features", cascade, images, source, one)

    def tokens(self, cascade: Cascade, images: ImageSet, source: str, layer: int) -> Chunks:
        """The tokens that block `layer` (from 0) reads at each grid, (N, n, D) in the passes' own precision."""
        kind = self.dtype or torch.float32

        def one(stage: SharedStage, batch: Tensor) -> Tensor:
            return stage.tokens_before(batch, layer).to(kind)

        return self._by_grid(f"tokens before layer {layer}", cascade, images, source, one)

    def answers(self, cascade: Cascade, images: ImageSet, model: str) -> Chunks:
        """Logits of every exit, (N, classes) float32, by the exit's number from 0; `model` is the cascade's hash."""

        names = [str(i) for i in range(cascade.num_stages)]

        def run(part: ImageSet, wanted: Sequence[str]) -> dict[str, Tensor]:
            # One pass answers for all exits.
            return self._run(cascade, part, names, lambda batch: [logits.float() for logits in cascade(batch)])

        return Chunks(self.folder, ["answers", model, str(self.dtype)], images, names, run)

    def _by_grid(
        self,
        what: str,
        cascade: Cascade,
        images: ImageSet,
        source: str,
        compute: Callable[[SharedStage, Tensor], Tensor],
    ) -> Chunks:
        config = cascade.config
        stages: dict[str, Any] = dict(zip(map(str, config.grids), cascade.stages, strict=True))
        key = [what, source, config.image_size, config.mean, config.std, str(self.dtype)]

        def run(part: ImageSet, wanted: Sequence[str]) -> dict[str, Tensor]:
            return self._run(cascade, part, wanted, lambda batch: [compute(stages[name], batch) for name in wanted])

        return Chunks(self.folder, key, images, list(stages), run)

    @torch.no_grad()
    def _run(
        self, cascade: Cascade, images: ImageSet, names: Sequence[str], compute: Callable[[Tensor], Iterable[Tensor]]
    ) -> dict[str, Tensor]:
        cascade.eval()
        device = next(cascade.parameters()).device
        parts: list[list[Tensor]] = []
        for batch, _ in labelled_batches(images, cascade.config, _BATCH):
            with torch.autocast(device.type, self.dtype, enabled=self.dtype is not None):
                parts.append([found.cpu() for found in compute(batch.to(device))])
        return {name: torch.cat(found) for name, found in zip(names, zip(*parts, strict=True), strict=True)}
