"""`tokensworth tune`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tokensworth.cli.options import Device, Json, Threads, answer, numbers, progress, set_threads


def tune(
    model: Annotated[str, typer.Option(help="timm name, `hf-hub:` id, or folder of a saved timm model.")],
    data: Annotated[
        str, typer.Option(help="Labelled images: Parquet file, folder of class folders, `cifar10`, a Hub data set.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for kept steps, the model, the policy and the report.")],
    weights: Annotated[str, typer.Option(help="Weights file for a timm name; timm's own where empty.")] = "",
    test: Annotated[
        str, typer.Option(help="Images to report on; `split:test` for --data's; empty for half of --held-out.")
    ] = "",
    grids: Annotated[
        str, typer.Option(help="Candidate token grid sides, growing; the best few are chosen.")
    ] = "4,7,10,14",
    keep_grids: Annotated[bool, typer.Option(help="Take all candidates instead of choosing.")] = False,
    score: Annotated[
        str, typer.Option(help="By which images leave: confidence, entropy, margin or learned.")
    ] = "confidence",
    budget: Annotated[str, typer.Option(help="Goal: mean MACs per image, as 350M or 1.2G.")] = "",
    millis: Annotated[float, typer.Option(help="Goal: mean milliseconds per image.")] = 0.0,
    held_out: Annotated[int, typer.Option(help="Images held out of fitting; 0 for a fifth, at most 5000.")] = 0,
    limit: Annotated[int, typer.Option(help="Fit on so many images only; 0 for all.")] = 0,
    image_size: Annotated[int, typer.Option(help="Side that images are held in; 0 for a fitting one.")] = 0,
    head: Annotated[str, typer.Option(help="linear or cosine.")] = "linear",
    text: Annotated[
        str, typer.Option(help="CLIP's text embeddings, a row per class (.npy or safetensors): nothing is fitted.")
    ] = "",
    feature: Annotated[str, typer.Option(help="Feature reuse, where trained: last, each or off.")] = "last",
    relation: Annotated[str, typer.Option(help="Relation reuse, where trained: all, matching or off.")] = "off",
    last_layers: Annotated[int, typer.Option(help="Only the last so many layers reuse; 0 for all.")] = 0,
    cached_epochs: Annotated[
        int, typer.Option(help="Passes over kept tokens that train the last layers' reuse, norms and heads.")
    ] = 0,
    train_blocks: Annotated[bool, typer.Option(help="With --cached-epochs, train these layers too.")] = False,
    epochs: Annotated[int, typer.Option(help="Passes of a full fine-tune; 0 for heads alone.")] = 0,
    fine_tune_static: Annotated[
        bool, typer.Option(help="Fine-tune the static model of the largest grid alike, to compare with.")
    ] = False,
    lr: Annotated[float, typer.Option(help="Of the fine-tune.")] = 1e-4,
    layer_decay: Annotated[
        float, typer.Option(help="Learning rate of a layer relative to that of the one after it.")
    ] = 0.8,
    train_batch: Annotated[int, typer.Option(help="Images per step of the fine-tune.")] = 64,
    precision: Annotated[str, typer.Option(help="auto, fp32 or bf16.")] = "auto",
    timed_images: Annotated[int, typer.Option(help="Test images that timings pass over.")] = 512,
    repeats: Annotated[int, typer.Option(help="Timed rounds; medians count.")] = 3,
    batch_size: Annotated[int, typer.Option(help="Batch of the timings.")] = 32,
    seed: Annotated[int, typer.Option(help="Of the split and the training.")] = 0,
    device: Device = "",
    threads: Threads = 0,
    as_json: Json = False,
) -> None:
    """Make a pretrained ViT adaptive; without --budget or --millis, as accurate as its largest grid. Can be stopped."""
    from tokensworth.cascade.config import NO_REUSE, Reuse
    from tokensworth.exits.goals import Macs, Millis
    from tokensworth.jobs.tune import TuneJob, Tuning
    from tokensworth.report.page import write_report
    from tokensworth.report.tables import study_table, tuning_tables

    set_threads(threads)
    reuse = Reuse(feature, relation=relation, joint_norm=False, layers=last_layers)  # type: ignore[arg-type]
    job = TuneJob(
        model,
        data,
        out,
        weights=weights,
        test=test,
        grids=numbers(grids),
        budget=Macs(budget) if budget else Millis(millis) if millis else None,
        held=held_out,
        limit=limit,
        image_size=image_size,
        head=head,
        text=text,
        reuse=reuse if epochs or cached_epochs else NO_REUSE,
        keep_grids=keep_grids,
        score=score,
        cached_epochs=cached_epochs,
        last_layers=last_layers,
        blocks=train_blocks,
        epochs=epochs,
        fine_tune_static=fine_tune_static,
        lr=lr,
        layer_decay=layer_decay,
        batch_size=train_batch,
        precision=precision,
        timed_images=timed_images,
        repeats=repeats,
        timed_batch=batch_size,
        device=device,
        seed=seed,
    )
    with progress("tuning", None, as_json) as update:

        def tell(step: str, done: int, total: int) -> None:
            update(done, total or None, step)

        tuned = Tuning(job, tell).run()
    page = out / "report.html"
    write_report(tuned.study, page, f"tokensworth tune: {model}")
    value: dict[str, Any] = tuned.record | {"out": str(out)}
    tables = [*tuning_tables(tuned.record), study_table(tuned.study)]
    answer(value, as_json, *tables, f"wrote {out / 'model'}, {out / 'policy.json'} and {page}")


def add_to(app: typer.Typer) -> None:
    """Registers the command of this file."""
    example = "Example: tokensworth tune --model vit_small_patch14_dinov2 --data photos/ --grids 4,7,10,16 --out tuned"
    app.command(epilog=example)(tune)
