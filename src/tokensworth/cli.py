"""The command line, thin: options in, a job run, a table or JSON out."""

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="tokensworth",
    help="Adaptive inference for vision transformers: spend on each image only the tokens it is worth.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


@app.callback()
def _root() -> None:
    pass


def _whole_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


@app.command()
def train(
    data: Annotated[str, typer.Option(help="Parquet file, folder of class folders, `cifar10`, or a Hub data set.")],
    out: Annotated[Path, typer.Option(help="Folder for the state, the log and the finished model.")],
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
    feature: Annotated[str, typer.Option(help="Feature reuse: last, each or off.")] = "last",
    relation: Annotated[str, typer.Option(help="Relation reuse: all, matching or off.")] = "all",
    context_hidden: Annotated[int, typer.Option(help="Hidden width of a context embedding.")] = 128,
    context_width: Annotated[int, typer.Option(help="Channels of a context embedding.")] = 48,
    pretrained: Annotated[bool, typer.Option(help="Start from timm's pretrained weights.")] = False,
    hold_out: Annotated[int, typer.Option(help="Images kept out of training, for calibration.")] = 0,
    limit: Annotated[int, typer.Option(help="Train on so many images only; 0 for all.")] = 0,
    epochs: Annotated[int, typer.Option()] = 20,
    batch_size: Annotated[int, typer.Option(help="Images per step and process.")] = 128,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
    warmup: Annotated[float, typer.Option(help="Epochs of warm-up.")] = 1.0,
    weight_decay: Annotated[float, typer.Option()] = 0.05,
    clip: Annotated[float, typer.Option(help="Largest gradient norm; 0 for none.")] = 1.0,
    ema: Annotated[float, typer.Option(help="Decay of the averaged weights; 0 for none.")] = 0.999,
    label_smoothing: Annotated[float, typer.Option()] = 0.1,
    mixup: Annotated[float, typer.Option()] = 0.0,
    cutmix: Annotated[float, typer.Option()] = 0.0,
    distill: Annotated[float, typer.Option(help="Weight of distillation from the last exit.")] = 0.0,
    precision: Annotated[str, typer.Option(help="auto, fp32 or bf16.")] = "auto",
    seed: Annotated[int, typer.Option()] = 0,
    workers: Annotated[int, typer.Option(help="Processes that decode larger images.")] = 0,
    save_every: Annotated[int, typer.Option(help="Steps between saved states.")] = 200,
) -> None:
    """Train a cascade, or the static reference of one grid; run it again to go on where it stopped."""
    from tokensworth.cascade import CascadeConfig, Reuse
    from tokensworth.jobs.training import TrainJob, run_training
    from tokensworth.train.loop import Recipe

    sizes = {"embed_dim": dim, "depth": depth, "num_heads": heads, "mlp_ratio": mlp_ratio}
    reuse = Reuse(
        feature=feature,  # type: ignore[arg-type]
        relation=relation,  # type: ignore[arg-type]
        joint_norm=not pretrained,
        hidden=context_hidden,
        width=context_width,
    )
    config = CascadeConfig(
        backbone,
        _whole_numbers(grids),
        classes,
        image_size=image_size,
        stem=stem,
        backbone_args=sizes if backbone == "vit" else {},
        reuse=reuse,
    )
    recipe = Recipe(
        epochs=epochs, batch_size=batch_size, lr=lr, warmup=warmup, weight_decay=weight_decay, clip=clip, ema=ema,
        label_smoothing=label_smoothing, mixup=mixup, cutmix=cutmix, distill=distill, precision=precision, seed=seed,
    )
    job = TrainJob(
        config.static(static) if static else config, data, out, recipe, hold_out, limit, workers, save_every,
        pretrained,
    )
    last = [-1]

    def show(progress) -> None:
        if progress.history and progress.epoch != last[0]:
            last[0] = progress.epoch
            print(progress.history[-1], flush=True)

    run_training(job, show)


def main() -> None:
    app()


if __name__ == "__main__":
    sys.exit(main())
