"""Training the last layers of a cascade of shared weights, or what they reuse alone, on kept tokens.

The layers before them are frozen and reuse nothing, so their output is computed once and read from disk: a pass over
the data costs the last layers only.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tokensworth.cascade import Cascade
from tokensworth.cascade.reuse import Upstream
from tokensworth.cascade.shared import OWN, SharedStage
from tokensworth.data.batches import derive_seed
from tokensworth.errors import TokensworthError
from tokensworth.jobs.tune.chunks import Chunks
from tokensworth.jobs.tune.job import TuneJob
from tokensworth.train.loop import Progress, Recipe, Trainer


class LastLayers(nn.Module):
    """The last layers of every stage: tokens of all grids, laid end to end, to the logits of every exit.

    Args:
        cascade: of shared weights.
        first: the first layer to run, from 0.
    """

    def __init__(self, cascade: Cascade, first: int) -> None:
        super().__init__()
        self.cascade, self.first = cascade, first

    def forward(self, tokens: Tensor) -> list[Tensor]:
        """(B, 1, n1 + n2 + ..., D) -> S tensors of (B, classes)."""
        stages: Sequence[SharedStage] = list(self.cascade.stages)  # type: ignore[assignment]
        counts = [stage.grid**2 + stage.vit.num_prefix_tokens for stage in stages]
        outputs: list[Tensor] = []
        state: Upstream | None = None
        for index, part in enumerate(tokens.squeeze(1).split(counts, dim=1)):
            stage = stages[index]
            hand_on = stage.leans and index + 1 < len(stages)
            x, state = stage.resume(part, self.first, state, hand_on)
            outputs.append(stage.vit.forward_head(stage.vit.norm(x)))
        return outputs

    def choose_parameters(self, blocks: bool) -> None:
        """Makes trainable what is each stage's own and, with `blocks`, the last layers themselves."""
        self.requires_grad_(False)
        for stage in self.cascade.stages:
            vit: Any = stage.vit
            own = [stage.feature, stage.relation, *(vit._modules.get(name) for name in OWN)]
            for part in [*own, *(vit.blocks[self.first :] if blocks else [])]:
                if isinstance(part, nn.Module):
                    part.requires_grad_(True)


class KeptTokens:
    """Training batches from kept tokens; order by seed and epoch, files shuffled and images within each.

    Args:
        chunks: tokens by grid.
        labels: (N,).
        batch_size: images per batch; what is left over in a file is passed over.
        seed: of the order.
    """

    def __init__(self, chunks: Chunks, labels: Tensor, batch_size: int, seed: int) -> None:
        self.chunks, self.labels, self.seed = chunks, labels, seed
        ends = [*chunks.starts[1:], len(labels)]
        self.sizes = dict(zip(chunks.starts, (e - s for s, e in zip(chunks.starts, ends, strict=True)), strict=True))
        self.batch_size = min(batch_size, max(self.sizes.values()))

    def steps(self) -> int:
        """Batches per epoch."""
        return sum(size // self.batch_size for size in self.sizes.values())

    def epoch(self, epoch: int, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Tokens (B, 1, n1 + n2 + ..., D) and labels (B,), from batch `first` of the epoch on."""
        random = np.random.default_rng(derive_seed(self.seed, epoch))
        step = 0
        for start in random.permutation(np.array(list(self.sizes))):
            size = self.sizes[int(start)]
            order = torch.from_numpy(random.permutation(size))
            count = size // self.batch_size
            if step + count <= first:
                step += count
                continue
            rows = torch.cat(list(self.chunks.read(int(start)).values()), dim=1)
            for place in range(count):
                if step >= first:
                    at = order[place * self.batch_size : (place + 1) * self.batch_size]
                    yield rows[at].unsqueeze(1), self.labels[int(start) + at]
                step += 1


def recipe_of(job: TuneJob) -> Recipe:
    """How reuse and the last layers are trained."""
    return Recipe(
        epochs=job.cached_epochs,
        batch_size=job.batch_size,
        lr=5e-4,
        layer_decay=job.layer_decay,
        min_lr=5e-6,
        warmup=0.2,
        ema=0.99,
        label_smoothing=0.0,
        distill=0.5,
        precision=job.precision,
        seed=job.seed,
    )


def train_last_layers(
    job: TuneJob, cascade: Cascade, chunks: Chunks, labels: Tensor, out: Path, tell: Callable[[str, int, int], None]
) -> Cascade:
    """Trains on kept tokens; stopped and run again, it goes on.

    Args:
        job: how long, and whether the blocks themselves too.
        cascade: of shared weights, reuse in the last layers alone; changed in place.
        chunks: tokens before those layers, by grid, of the images that the heads were fitted on.
        labels: (N,) of these images.
        out: folder of the training state.
        tell: told of progress.

    Raises:
        TokensworthError: a cascade that reuses in earlier layers too.
    """
    stage: SharedStage = cascade.stages[0]  # type: ignore[assignment]
    layers = job.last_layers
    if stage.leans and stage.reusing > layers:
        raise TokensworthError(f"{stage.reusing} layers reuse, but only the last {layers} are trained on kept tokens")
    model = LastLayers(cascade, stage.layers - layers)
    model.choose_parameters(job.blocks)
    trainer = Trainer(
        model,
        lambda rank, world: KeptTokens(chunks, labels, job.batch_size, job.seed),
        recipe_of(job),
        out,
        save_every=100,
        identity={"blocks": job.blocks},
    )

    def on_step(at: Progress) -> None:
        tell(f"training the last {layers} layers, loss {at.loss:.3f}", at.step, at.total)

    averaged = trainer.run(on_step)
    trained: Cascade = averaged.cascade  # type: ignore[assignment]
    return trained.requires_grad_(True).eval()
