"""`tokensworth train`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tokensworth.cli.options import (
    DepthRoot,
    Json,
    Root,
    Task,
    answer,
    check_task,
    load_depth,
    numbers,
    progress,
    set_threads,
)


def train(
    data: Annotated[
        str,
        typer.Option(
            help="Parquet file, folder of class folders, `cifar10`, a Hub data set; for depth, nyu:FILE or kitti:FILE."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the state, the log and the finished model.")],
    task: Task = "classify",
    classes: Annotated[int, typer.Option(help="Number of classes.")] = 10,
    backbone: Annotated[str, typer.Option(help="timm name, `t2t_vit_12` and so on, or `vit` with sizes.")] = "vit",
    grids: Annotated[str, typer.Option(help="Token grid sides, growing.")] = "3,5,8",
    static: Annotated[int, typer.Option(help="Train the plain model of this one grid instead.")] = 0,
    image_size: Annotated[int, typer.Option(help="Side of the input image in pixels.")] = 32,
    stem: Annotated[str, typer.Option(help="patch, t2t, t2t_softmax or conv; empty for the backbone's own.")] = "",
    dim: Annotated[int, typer.Option(help="`vit` only: token width.")] = 96,
    depth: Annotated[int, typer.Option(help="`vit` only: layers.")] = 3,
    heads: Annotated[int, typer.Option(help="`vit` only: attention heads.")] = 3,
    mlp_ratio: Annotated[float, typer.Option(help="`vit` only: MLP width over token width.")] = 2.0,
    drop_path: Annotated[float, typer.Option(help="Stochastic depth rate.")] = 0.0,
    feature: Annotated[str, typer.Option(help="Feature reuse: last, each or off.")] = "last",
    relation: Annotated[str, typer.Option(help="Relation reuse: all, matching or off.")] = "all",
    upsample: Annotated[str, typer.Option(help="Resizing of relations: grid or naive.")] = "grid",
    class_token: Annotated[bool, typer.Option(help="Reuse the class token's features too.")] = False,
    weighting: Annotated[bool, typer.Option(help="Learn the weights of own against reused relations.")] = False,
    context_hidden: Annotated[int, typer.Option(help="Hidden width of a context embedding.")] = 128,
    context_width: Annotated[int, typer.Option(help="Channels of a context embedding.")] = 48,
    encoder: Annotated[str, typer.Option(help="depth only: timm name, or folder of a timm model.")] = "",
    decoder: Annotated[str, typer.Option(help="depth only: newcrfs, dpt or linear.")] = "newcrfs",
    widths: Annotated[str, typer.Option(help="depth only: of the decoder's scales, fine to coarse.")] = "64,96,128,192",
    crop: Annotated[
        str, typer.Option(help="depth only: height and width trained on, as 352,704; --image-size both where empty.")
    ] = "",
    max_depth: Annotated[float, typer.Option(help="depth only: metres; the data's own where 0.")] = 0.0,
    validate: Annotated[str, typer.Option(help="depth only: evaluated after each epoch, as --data.")] = "",
    root: Root = None,
    depth_root: DepthRoot = None,
    pretrained: Annotated[bool, typer.Option(help="Start from timm's pretrained weights.")] = False,
    start: Annotated[
        Path | None, typer.Option(help="Go on from this saved model; its shape and token method stay.")
    ] = None,
    teacher: Annotated[Path | None, typer.Option(help="Learn from this saved model too; see --teach.")] = None,
    teach: Annotated[float, typer.Option(help="Weight of learning from --teacher.")] = 1.0,
    hold_out: Annotated[int, typer.Option(help="Images kept out of training, for calibration.")] = 0,
    limit: Annotated[int, typer.Option(help="Train on so many images only; 0 for all.")] = 0,
    epochs: Annotated[int, typer.Option(help="Passes over the data.")] = 20,
    batch_size: Annotated[int, typer.Option(help="Images per step and process.")] = 128,
    optimizer: Annotated[str, typer.Option(help="adamw, muon, or another of timm's.")] = "adamw",
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
    token_lr: Annotated[float, typer.Option(help="Learning rate of gates and predictors, relative to --lr.")] = 10.0,
    layer_decay: Annotated[
        float, typer.Option(help="Learning rate of a layer relative to that of the one after it.")
    ] = 1.0,
    warmup: Annotated[float, typer.Option(help="Epochs of warm-up.")] = 1.0,
    weight_decay: Annotated[float, typer.Option(help="Of matrices.")] = 0.05,
    clip: Annotated[float, typer.Option(help="Largest gradient norm; 0 for none.")] = 1.0,
    ema: Annotated[float, typer.Option(help="Decay of the averaged weights; 0 for none.")] = 0.999,
    label_smoothing: Annotated[float, typer.Option(help="Of hard labels.")] = 0.1,
    mixup: Annotated[float, typer.Option(help="Mixup's alpha; 0 for none.")] = 0.0,
    cutmix: Annotated[float, typer.Option(help="Cutmix's alpha; 0 for none.")] = 0.0,
    distill: Annotated[float, typer.Option(help="Weight of distillation from the last exit.")] = 0.0,
    exit_weights: Annotated[str, typer.Option(help="Weight of each exit's loss, as 1,1,2; equal where empty.")] = "",
    precision: Annotated[str, typer.Option(help="auto, fp32 or bf16.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of initialization, hold-out, order and augmentation.")] = 0,
    workers: Annotated[int, typer.Option(help="Processes that decode larger images.")] = 0,
    save_every: Annotated[int, typer.Option(help="Steps between saved states.")] = 200,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 for PyTorch's choice.")] = 0,
    as_json: Json = False,
) -> None:
    """Train a cascade, the static reference of one grid, or a depth model; run it again to go on where it stopped."""
    from rich.table import Table

    from tokensworth.cascade import Cascade, CascadeConfig, Reuse
    from tokensworth.cascade.backbone import timm_normalization
    from tokensworth.errors import TokensworthError
    from tokensworth.jobs.training import TrainJob, run_training
    from tokensworth.train.loop import Progress, Recipe

    set_threads(threads)
    try:
        weights = tuple(float(w) for w in exit_weights.split(",")) if exit_weights else ()
    except ValueError:
        raise TokensworthError(f"--exit-weights {exit_weights!r}: write numbers such as 1,1,2") from None
    recipe = Recipe(
        epochs=epochs,
        batch_size=batch_size,
        optimizer=optimizer,
        lr=lr,
        token_lr=token_lr,
        layer_decay=layer_decay,
        warmup=warmup,
        weight_decay=weight_decay,
        clip=clip,
        ema=ema,
        label_smoothing=label_smoothing,
        mixup=mixup,
        cutmix=cutmix,
        exit_weights=weights,
        distill=distill,
        teach=teach if teacher else 0.0,
        precision=precision,
        seed=seed,
    )
    if check_task(task):
        if not encoder and start is None:
            raise TokensworthError("--task depth: give --encoder, or a depth model with --start")
        sides = numbers(crop) if crop else (image_size, image_size)
        _train_depth(
            encoder,
            {"decoder": decoder, "widths": numbers(widths), "max_depth": max_depth, "image_size": sides},
            (data, root, depth_root),
            validate,
            limit,
            as_json,
            {"out": out, "recipe": recipe, "workers": workers, "save_every": save_every}
            | {"pretrained": pretrained, "start": start, "teacher": teacher},
        )
        return
    sizes = {"embed_dim": dim, "depth": depth, "num_heads": heads, "mlp_ratio": mlp_ratio}
    drop = {"drop_path_rate": drop_path} if drop_path else {}
    reuse = Reuse(
        feature=feature,  # type: ignore[arg-type]
        class_token=class_token,
        relation=relation,  # type: ignore[arg-type]
        upsample=upsample,  # type: ignore[arg-type]
        weighting=weighting,
        joint_norm=not pretrained,
        hidden=context_hidden,
        width=context_width,
    )
    config = CascadeConfig(
        backbone,
        numbers(grids),
        classes,
        image_size=image_size,
        stem=stem,
        backbone_args={**(sizes if backbone == "vit" else {}), **drop},
        reuse=reuse,
        **timm_normalization(backbone),
    )
    config = config.static(static) if static else config
    job = TrainJob(
        Cascade.from_pretrained(start).config if start else config,
        data,
        out,
        recipe,
        hold_out,
        limit,
        workers,
        save_every,
        pretrained,
        start,
        teacher,
    )
    with progress("training", None, as_json) as update:

        def on_step(p: Progress) -> None:
            held = p.history[-1].get("held_out_accuracy") if p.history else None
            update(
                p.step,
                p.total,
                f"epoch {p.epoch + 1}, loss {p.loss:.3f}" + (f", held out {held}" if held else ""),
            )

        record = run_training(job, on_step)
    table = Table("epoch", "loss", "held-out accuracy %", title=f"saved to {out}")
    for entry in record["history"]:
        table.add_row(str(entry["epoch"]), f"{entry['loss']:.4f}", str(entry.get("held_out_accuracy", "")))
    answer(record, as_json, table)


def _train_depth(
    encoder: str,
    model: dict[str, Any],
    data: tuple[str, Path | None, Path | None],
    validate: str,
    limit: int,
    as_json: bool,
    rest: dict[str, Any],
) -> None:
    from rich.table import Table

    from tokensworth.data.sources import hold_out
    from tokensworth.dense.model import DepthConfig
    from tokensworth.errors import TokensworthError
    from tokensworth.jobs.depth_training import DepthJob, run_depth_training
    from tokensworth.train.loop import Progress

    images = load_depth(*data)
    if limit:
        images = images.select(hold_out(len(images), max(0, len(images) - limit), rest["recipe"].seed)[0])
    if len(model["image_size"]) != 2:
        raise TokensworthError("--crop: write height and width, as 352,704")
    config = DepthConfig(**{**model, "max_depth": model["max_depth"] or images.layout.max_depth})
    held = load_depth(validate, *data[1:]) if validate else None
    job = DepthJob(encoder, config, images, validate=held, **rest)
    with progress("training", None, as_json) as update:

        def on_step(p: Progress) -> None:
            update(p.step, p.total, f"epoch {p.epoch + 1}, loss {p.loss:.3f}")

        record = run_depth_training(job, on_step)
    table = Table("epoch", "loss", "abs_rel", "delta1", title=f"saved to {job.out}")
    for entry in record["history"]:
        found = entry.get("validation")
        cells = (f"{found['abs_rel']:.4f}", f"{found['delta1']:.4f}") if found else ("", "")
        table.add_row(str(entry["epoch"]), f"{entry['loss']:.4f}", *cells)
    answer(record, as_json, table)
    if images.problems:
        raise typer.Exit(1)


def add_to(app: typer.Typer) -> None:
    """Registers the commands of this file."""
    example = "Example: tokensworth train --data cifar10 --stem conv --grids 3,5,8 --hold-out 5000 --out runs/cifar10"
    app.command(epilog=example)(train)
