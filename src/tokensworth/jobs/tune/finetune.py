"""The full fine-tune of a cascade of shared weights, by the product's own training."""

from collections.abc import Callable
from pathlib import Path

from tokensworth.cascade import Cascade
from tokensworth.jobs.training import TrainJob, run_training
from tokensworth.jobs.tune.job import TuneJob
from tokensworth.jobs.tune.parts import Parts
from tokensworth.train.loop import Progress, Recipe


def recipe_of(job: TuneJob) -> Recipe:
    """How a pretrained model is fine-tuned: small steps, smaller near the image, and no smoothing of labels.

    Smoothed labels would make right and wrong answers alike in confidence, by which images leave.
    """
    return Recipe(
        epochs=job.epochs,
        batch_size=job.batch_size,
        lr=job.lr,
        layer_decay=job.layer_decay,
        min_lr=job.lr / 100,
        warmup=0.2,
        ema=0.99,
        label_smoothing=0.0,
        distill=0.5,
        precision=job.precision,
        seed=job.seed,
    )


def fine_tune(
    job: TuneJob, parts: Parts, cascade: Cascade, out: Path, tell: Callable[[str, int, int], None]
) -> Cascade:
    """Trains all weights on the very images that the heads were fitted on; stopped and run again, it goes on.

    Args:
        job: how long and how fast.
        parts: the images.
        cascade: heads fitted.
        out: folder of the training state.
        tell: told of progress.

    Returns:
        The averaged model, its weights rounded to float16.
    """
    start = out / "start"
    cascade.save_pretrained(start)
    limit = len(parts.fit)
    train = TrainJob(
        cascade.config, job.data, out, recipe_of(job), hold_out=parts.held, limit=limit, save_every=50, start=start
    )

    def on_step(at: Progress) -> None:
        tell(f"fine-tuning, loss {at.loss:.3f}", at.step, at.total)

    run_training(train, on_step)
    return Cascade.from_pretrained(out)
