"""What a cascade is made of, as plain data that can be saved, hashed and printed."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

from tokensworth.errors import InvalidGridError, TokensworthError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def _choice(name: str, value: str, options: tuple[str, ...]) -> None:
    if value not in options:
        raise TokensworthError(f"{name}={value!r} is not one of {', '.join(options)}")


@dataclass(frozen=True)
class Reuse:
    """What a stage takes from the one before it; the defaults are the DVT paper's.

    Attributes:
        feature: context embeddings from the upstream stage's `last` layer, from `each` layer (layer l reads
            layer l), or `off`.
        class_token: let the prefix tokens' rows through feature reuse too; otherwise they are zeros.
        relation: attention logits of `all` upstream layers, of the `matching` layer only, or `off`.
        upsample: `grid` resizes each row and column of a relation map as a token grid; `naive` as a line.
        weighting: learn per layer and head how much own and reused relations count.
        joint_norm: one LayerNorm over token and context channels, as in the paper. Otherwise the context
            has no norm of its own and the pretrained norm is untouched, so that a stage can start exactly
            as its pretrained model.
        hidden: width inside a context embedding's MLP.
        width: channels of a context embedding; in shared weights it is as wide as the tokens.
        layers: only the last so many layers reuse, and hand on relations; 0 for all. For shared weights alone.
    """

    feature: Literal["last", "each", "off"] = "last"
    class_token: bool = False
    relation: Literal["all", "matching", "off"] = "all"
    upsample: Literal["grid", "naive"] = "grid"
    weighting: bool = False
    joint_norm: bool = True
    hidden: int = 128
    width: int = 48
    layers: int = 0

    def __post_init__(self) -> None:
        _choice("feature", self.feature, ("last", "each", "off"))
        _choice("relation", self.relation, ("all", "matching", "off"))
        _choice("upsample", self.upsample, ("grid", "naive"))


NO_REUSE = Reuse(feature="off", relation="off")


@dataclass(frozen=True)
class CascadeConfig:
    """A cascade of stages of one architecture, of separate or of shared weights.

    Attributes:
        backbone: a timm `VisionTransformer` name, a T2T-ViT (`t2t_vit_7` ... `t2t_vit_24`), or `vit` with
            its sizes in `backbone_args`.
        grids: token grid side of each stage, growing. One grid alone is a static model without exits,
            the reference that a cascade must beat.
        num_classes: number of classes.
        image_size: side of the square input image in pixels.
        stem: `patch`, `t2t` (Performer), `t2t_softmax` or `conv`; empty means the backbone's own.
        in_chans: channels of the image.
        backbone_args: extra arguments of timm's VisionTransformer.
        reuse: what a stage takes from the one before.
        mean, std: normalization of the image's channels, after scaling to [0, 1].
        class_names: names of the classes, or empty.
        tokens: the token method of every stage, as `Method.to_dict` gives it; None for none.
        share: all stages are one transformer at growing token counts, its weights held once. `backbone` is then any
            timm `VisionTransformer` or `Eva`, `image_size` what images are given in: each stage resizes them.
        head: of every stage, `linear` or `cosine`; shared weights alone have cosines.
        head_width: of the space that a cosine head projects to, as CLIP's; 0 for none.
    """

    backbone: str
    grids: tuple[int, ...]
    num_classes: int
    image_size: int = 224
    stem: str = ""
    in_chans: int = 3
    backbone_args: dict[str, Any] = field(default_factory=dict)
    reuse: Reuse = Reuse()
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    class_names: tuple[str, ...] = ()
    tokens: dict[str, Any] | None = None
    share: bool = False
    head: str = "linear"
    head_width: int = 0

    def __post_init__(self) -> None:
        grids = tuple(self.grids)
        if not grids or any(not isinstance(g, int) or g < 1 for g in grids):
            raise InvalidGridError(f"grids must be positive whole numbers, not {list(grids)}")
        if any(a >= b for a, b in pairwise(grids)):
            raise InvalidGridError(f"grids must grow from stage to stage, not {list(grids)}")
        if self.class_names and len(self.class_names) != self.num_classes:
            raise TokensworthError(f"{len(self.class_names)} class names for {self.num_classes} classes")
        for name in ("grids", "mean", "std", "class_names"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if isinstance(self.reuse, Mapping):
            object.__setattr__(self, "reuse", Reuse(**self.reuse))
        _choice("head", self.head, ("linear", "cosine"))
        if not self.share and (self.reuse.layers or self.head != "linear"):
            raise TokensworthError("reuse in the last layers alone and cosine heads need share=True")

    def static(self, grid: int) -> "CascadeConfig":
        """The plain model of one grid alone: one point of the static frontier."""
        return replace(self, grids=(grid,), reuse=NO_REUSE, tokens=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "CascadeConfig":
        """The inverse of `to_dict`.

        Raises:
            TokensworthError: unknown or missing entries.
        """
        try:
            return cls(**values)
        except TypeError as error:
            raise TokensworthError(f"not a cascade's configuration: {error}") from None
