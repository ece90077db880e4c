"""`tokensworth adapt | fit | show`: token methods on a model."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokensworth.cli.options import (
    Data,
    Device,
    Json,
    Seed,
    Split,
    Threads,
    answer,
    existing_folder,
    load_images,
    progress,
    set_threads,
)
from tokensworth.errors import TokensworthError

if TYPE_CHECKING:
    from tokensworth.measure.describe import Description
    from tokensworth.tokens.overlap import LayerReport

AnyModel = Annotated[
    str, typer.Option(help="timm name (with its pretrained weights), folder of a saved model, or `packaged`.")
]


def _options(pairs: list[str]) -> dict[str, Any]:
    """`keep=0.5` as a name and a value; lists as `layers=2,4`."""
    out: dict[str, Any] = {}
    for pair in pairs:
        name, found, text = pair.partition("=")
        if not found:
            raise TokensworthError(f"--set {pair!r}: write name=value, for example keep=0.8")
        parts = [_value(part) for part in text.split(",")]
        out[name] = parts[0] if len(parts) == 1 and name != "layers" else parts
    return out


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def adapt(
    model: AnyModel,
    out: Annotated[Path, typer.Option(help="Folder for the adapted model.")],
    method: Annotated[str, typer.Option(help="Token method; an unknown name lists them.")] = "tosa",
    option: Annotated[
        list[str], typer.Option("--set", help="Option of the method, as keep=0.8 or layers=2,4; may be repeated.")
    ] = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Apply a token method to a model and save it, with what an image costs before and after.

    A model that is adapted with the same method gets the new options and keeps what it has learned.
    """
    from tokensworth.jobs.models import open_model, save_model
    from tokensworth.measure.describe import describe
    from tokensworth.tokens import adapt as apply
    from tokensworth.tokens import method_from_dict, method_of, readapt

    opened = open_model(model, "cpu")
    known = method_of(opened)
    if known is not None and known.name == method:
        readapt(opened, method_from_dict({**known.to_dict(), **_options(option)}))
    else:
        apply(opened, method_from_dict({"name": method, **_options(option)}))
    save_model(opened, out)
    cost = describe(opened)
    answer(asdict(cost) | {"out": str(out)}, as_json, _costs(cost), f"wrote {out}")


def _costs(cost: "Description") -> Any:
    from rich.table import Table

    from tokensworth.exits.goals import show_cost

    title = f"{show_cost(cost.macs, 'MACs')} instead of {show_cost(cost.dense_macs, 'MACs')} per image"
    table = Table("layer", "tokens that take part", "selector's MACs", title=f"{title}, {100 * cost.saved:.1f} % saved")
    for layer in cost.layers:
        selector = "" if layer.selector_macs is None else show_cost(layer.selector_macs, "MACs")
        table.add_row(layer.name, f"{layer.kept} of {layer.tokens}", selector)
    return table


def fit(
    model: AnyModel,
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder for the state, the report and the fitted model.")],
    split: Split = "train",
    held_out: Annotated[int, typer.Option(help="Images kept out for the report and the early stop.")] = 0,
    limit: Annotated[int, typer.Option(help="Fit on so many images only; 0 for all.")] = 0,
    epochs: Annotated[int, typer.Option(help="Passes over the images, at most.")] = 8,
    batch_size: Annotated[int, typer.Option(help="Images per step.")] = 16,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-2,
    keep: Annotated[float, typer.Option(help="ToSA: keep ratio at which the report judges the choice.")] = 0.5,
    share: Annotated[
        float, typer.Option(help="STAR: choose the rates for this mean share of patches; 0 leaves them.")
    ] = 0.0,
    seed: Seed = 0,
    device: Device = "",
    threads: Threads = 0,
    as_json: Json = False,
) -> None:
    """Fit what a method learns without labels: ToSA's selectors (run it again to go on), STAR's offline importance,
    VTC-LFC's channels."""
    from tokensworth.data.sources import hold_out
    from tokensworth.files import write_json
    from tokensworth.jobs.models import ImageBatches, evaluation_transform, open_model, save_model
    from tokensworth.tokens.method import method_of
    from tokensworth.tokens.methods.vtc_lfc import VTCLFC
    from tokensworth.train.channels import prune_channels
    from tokensworth.train.selectors import SelectorProgress, SelectorRecipe, fit_selectors
    from tokensworth.train.star import fit_star
    from tokensworth.train.unlabelled import can_fit

    set_threads(threads)
    opened = open_model(model, device)
    method = method_of(opened)
    if method is not None and method.name != "tosa" and not can_fit(method):
        raise TokensworthError(f"{method.name} has nothing to fit; `tokensworth train --start {model}` trains it")
    images, held = load_images(data, split), None
    if held_out:
        left, kept_out = hold_out(len(images), held_out, seed)
        images, held = images.select(left), images.select(kept_out)
    if limit:
        images = images.select(hold_out(len(images), max(0, len(images) - limit), seed)[0])
    transform = evaluation_transform(opened)
    if isinstance(method, VTCLFC):
        with progress("fitting", None, as_json):
            widths = prune_channels(opened, ImageBatches(images, transform, batch_size), method.channels)
        save_model(opened, out)
        value = {"images": len(images), "hidden": widths}
        write_json(out / "fit.json", value)
        left = f"hidden channels left in each layer: {', '.join(map(str, widths))}"
        answer(value | {"out": str(out)}, as_json, left, f"wrote {out}")
        return
    if method is not None and method.name == "star":
        with progress("fitting", len(images), as_json) as update:
            found = fit_star(
                opened, ImageBatches(images, transform, batch_size), share=share or None, on_batch=lambda n: update(n)
            )
        save_model(opened, out)
        write_json(out / "fit.json", asdict(found))
        keeps = ", ".join(f"{k:.3g} at layer {n}" for n, k in zip(found.layers, found.keep, strict=True))
        answer(asdict(found) | {"out": str(out)}, as_json, f"STAR keeps {keeps}", f"wrote {out}")
        return
    with progress("fitting", None, as_json) as update:

        def on_step(p: SelectorProgress) -> None:
            update(p.step, p.total, f"divergence {p.kl:.4f}")

        result = fit_selectors(
            opened,
            ImageBatches(images, transform, batch_size, keep=len(images) <= 2000),
            held_out=ImageBatches(held, transform, batch_size, keep=True) if held else None,
            recipe=SelectorRecipe(epochs=epochs, lr=lr, seed=seed),
            keep=keep,
            out=out,
            on_step=on_step,
        )
    save_model(opened, out)
    record = {"images": len(images), "held_out": held_out, "keep": keep, **asdict(result)}
    write_json(out / "fit.json", record)
    answer(record | {"out": str(out)}, as_json, overlap_table(result.report, keep), f"wrote {out}")


def overlap_table(report: "list[LayerReport]", keep: float) -> Any:
    """Divergence and overlap of each ToSA layer, the mean last."""
    from rich.table import Table

    kinds = ("sampled", "all_rows", "current", "random")
    title = f"overlap with the true choice of {100 * keep:.0f} % of the patches: heads together (mean of each head's)"
    columns = ("layer", "KL", "KL of current map", "selector", "from all rows", "current layer's sums", "random")
    table = Table(*columns, title=title)
    cells = [[(getattr(r, k).layer, getattr(r, k).mean) for k in kinds] for r in report]
    means = [tuple(sum(row[i][j] for row in cells) / len(cells) for j in (0, 1)) for i in range(len(kinds))]
    for r, row in zip(report, cells, strict=True):
        table.add_row(r.name, f"{r.kl:.3f}", f"{r.kl_current:.3f}", *(f"{a:.3f} ({b:.3f})" for a, b in row))
    table.add_row("mean", "", "", *(f"{a:.3f} ({b:.3f})" for a, b in means))
    return table


def show(
    image: Annotated[Path, typer.Argument(help="Image file.")],
    model: AnyModel,
    out: Annotated[Path, typer.Option(help="HTML page to write.")] = Path("tokens.html"),
    device: Device = "",
    as_json: Json = False,
) -> None:
    """Show which tokens of an image take part in each ToSA layer."""
    from tokensworth.data.decode import decode_image
    from tokensworth.jobs.models import evaluation_transform, open_model
    from tokensworth.jobs.showing import shown_tokens
    from tokensworth.report.tokens import write_tokens_page

    existing_folder(image)
    opened = open_model(model, device)
    shown = shown_tokens(opened, evaluation_transform(opened)(decode_image(image)), str(image))
    write_tokens_page([shown], out)
    value = {
        "image": str(image),
        "layers": [{"layer": x.name, "grid": x.grid, "kept": x.kept} for x in shown.layers],
        "out": str(out),
    }
    lines = [f"layer {x.name}: {sum(x.kept)} of {len(x.kept)} patches take part" for x in shown.layers]
    answer(value, as_json, *lines, f"wrote {out}")


def add_to(app: typer.Typer) -> None:
    """Registers the commands of this file."""
    app.command(epilog="Example: tokensworth adapt --model deit_tiny_patch16_224 --set layers=2,4,6,8,10 --out tosa")(
        adapt
    )
    app.command(epilog="Example: tokensworth fit --model tosa --data images/ --held-out 200 --out tosa-fitted")(fit)
    app.command(epilog="Example: tokensworth show photo.jpg --model tosa-fitted --out tokens.html")(show)
