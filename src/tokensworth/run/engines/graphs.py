"""One graph per stage, with a dynamic batch: what passes between stages are its inputs and outputs.

A stage takes the images and, where it reuses them, the features and relations of the stage before; it gives its logits
and what the next stage reuses. Survivors are gathered between the graphs.
"""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tokensworth.cascade import Cascade, Upstream
from tokensworth.cascade.resize import ImageResize, MatrixImageResize, RowResize, SeparableResize
from tokensworth.errors import MissingExtraError
from tokensworth.files import atomic_path

# Images of the example that a graph is traced with; a batch of one would be taken for a constant.
_EXAMPLE = 2
OPSET = 18


@dataclass(frozen=True)
class Ports:
    """What a stage's graph takes and gives besides images and logits.

    Attributes:
        takes: of `features` and `relations`, those of the stage before that it reuses.
        gives: those that the next stage reuses.
    """

    takes: tuple[str, ...]
    gives: tuple[str, ...]

    @property
    def inputs(self) -> list[str]:
        """Names of the graph's inputs."""
        return ["images", *self.takes]

    @property
    def outputs(self) -> list[str]:
        """Names of its outputs."""
        return ["logits", *(f"next_{name}" for name in self.gives)]


def ports_of(cascade: Cascade) -> list[Ports]:
    """The ports of every stage."""
    takes: list[tuple[str, ...]] = []
    for stage in cascade.stages:
        parts = {"features": stage.feature, "relations": stage.relation}
        takes.append(tuple(name for name, part in parts.items() if part is not None))
    return [Ports(mine, after) for mine, after in zip(takes, [*takes[1:], ()], strict=True)]


def state_of(images: Tensor, found: dict[str, Tensor]) -> Upstream:
    """What a graph gave, as the runner carries it; features that nobody reuses are empty."""
    features = found.get("features")
    return Upstream(images.new_empty(len(images), 0) if features is None else features, found.get("relations"))


class StageGraph(nn.Module):
    """A stage as a function of tensors alone.

    Args:
        stage: the stage; copied, resizing replaced by products, which engines know.
        ports: what it takes and gives.
        image_size: side of the images.
    """

    def __init__(self, stage: nn.Module, ports: Ports, image_size: int) -> None:
        super().__init__()
        self.stage, self.ports = _with_products(copy.deepcopy(stage), image_size), ports

    def forward(self, images: Tensor, *taken: Tensor) -> tuple[Tensor, ...]:
        """Images (B, C, S, S) and what the stage takes, to its logits (B, classes) and what it gives."""
        found = dict(zip(self.ports.takes, taken, strict=True))
        state = state_of(images, found) if found else None
        logits, handed_on = self.stage(images, state, hand_on=bool(self.ports.gives))
        given: list[Any] = [getattr(handed_on, name) for name in self.ports.gives]
        return logits, *given


def _with_products(stage: nn.Module, image_size: int) -> nn.Module:
    for path, part in list(stage.named_modules()):
        above, _, name = path.rpartition(".")
        if isinstance(part, RowResize):
            setattr(stage.get_submodule(above), name, SeparableResize(part))
        elif isinstance(part, ImageResize) and part.size != (image_size, image_size):
            setattr(stage.get_submodule(above), name, MatrixImageResize(part, image_size))
    return stage


def stage_graphs(cascade: Cascade) -> list[tuple[StageGraph, tuple[Tensor, ...]]]:
    """Graphs of all stages, in evaluation mode and without gradients, each with inputs made from random images."""
    config = cascade.eval().config
    shape = (_EXAMPLE, config.in_chans, config.image_size, config.image_size)
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found: list[tuple[StageGraph, tuple[Tensor, ...]]] = []
    state: Upstream | None = None
    with torch.no_grad():
        for index, (stage, ports) in enumerate(zip(cascade.stages, ports_of(cascade), strict=True)):
            taken = [] if state is None else [getattr(state, name) for name in ports.takes]
            # The stage runs before it is copied: what it keeps ready for inference becomes constant in the graph.
            state = cascade.run_stage(index, images, state)[1]
            graph = StageGraph(stage, ports, config.image_size).eval().requires_grad_(False)
            found.append((graph, (images, *taken)))
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns of its own internals."""
    import logging

    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def write_onnx(
    graph: nn.Module, inputs: tuple[Tensor, ...], input_names: list[str], output_names: list[str], path: Path
) -> None:
    """Writes a graph as ONNX, its batch dynamic, atomically.

    Args:
        graph: a module that takes and gives tensors with the batch first.
        inputs: an example.
        input_names, output_names: of the graph.
        path: the file.

    Raises:
        MissingExtraError: onnx or onnxscript is not installed.
    """
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError:
        raise MissingExtraError("exporting to ONNX", "export") from None
    batch = torch.export.Dim("batch", min=1)
    shapes = tuple({0: batch} for _ in inputs)
    with torch.no_grad(), _quiet(), atomic_path(path) as temporary:
        program = torch.onnx.export(
            graph,
            inputs,
            input_names=input_names,
            output_names=output_names,
            dynamic_shapes=(shapes[0], shapes[1:]) if len(shapes) > 1 else shapes,
            dynamo=True,
            opset_version=OPSET,
            optimize=True,
            verbose=False,
        )
        assert program is not None
        program.save(temporary, external_data=False)


def stage_files(cascade: Cascade, folder: Path) -> list[Path]:
    """Writes every stage as `stage_1.onnx` and so on, and returns the paths.

    Raises:
        MissingExtraError: onnx or onnxscript is not installed.
    """
    paths = []
    for index, (graph, inputs) in enumerate(stage_graphs(cascade)):
        path = folder / f"stage_{index + 1}.onnx"
        write_onnx(graph, inputs, graph.ports.inputs, graph.ports.outputs, path)
        paths.append(path)
    return paths
