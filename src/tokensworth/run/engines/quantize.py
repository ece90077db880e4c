"""int8 variants of the stages' graphs by ONNX Runtime's own tool; OpenVINO runs them too."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokensworth.cascade import Cascade, Upstream
from tokensworth.errors import MissingExtraError
from tokensworth.files import atomic_path
from tokensworth.run.engines.graphs import ports_of

# Weights of these are quantized, per output channel; products of two activations, as in attention, are not.
_OPERATORS = ["MatMul", "Gemm", "Conv"]


def _inputs(cascade: Cascade, batches: Sequence[Tensor]) -> list[list[dict[str, Any]]]:
    """What every stage's graph is given for some batches of images, by the graph's names."""
    found: list[list[dict[str, Any]]] = [[] for _ in cascade.stages]
    with torch.no_grad():
        for images in batches:
            state: Upstream | None = None
            for index, ports in enumerate(ports_of(cascade)):
                given = {"images": images} | {name: getattr(state, name) for name in ports.takes}
                found[index].append({name: x.numpy() for name, x in given.items()})
                state = cascade.run_stage(index, images, state)[1]
    return found


def quantize_graphs(cascade: Cascade, graphs: Sequence[Path], batches: Sequence[Tensor], folder: Path) -> list[Path]:
    """Writes int8 variants of graphs under the same names.

    Args:
        cascade: the model.
        graphs: its stages as ONNX files.
        batches: normalized images (B, C, S, S), from whose activations the ranges are taken.
        folder: where to write.

    Raises:
        MissingExtraError: ONNX Runtime or onnx is not installed.
    """
    try:
        from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
        from onnxruntime.quantization.shape_inference import quant_pre_process
    except ImportError:
        raise MissingExtraError("quantization", "export") from None

    class Reader(CalibrationDataReader):
        def __init__(self, inputs: list[dict[str, Any]]) -> None:
            self.inputs: Iterator[dict[str, Any]] = iter(inputs)

        def get_next(self) -> dict[str, Any] | None:  # type: ignore[override]
            return next(self.inputs, None)

    paths = []
    for graph, inputs in zip(graphs, _inputs(cascade, batches), strict=True):
        path = folder / graph.name
        with atomic_path(path) as temporary, atomic_path(folder / f"{graph.stem}_prepared.onnx") as prepared:
            logging.getLogger().setLevel(max(logging.getLogger().level, logging.WARNING))
            quant_pre_process(str(graph), str(prepared), skip_symbolic_shape=True)
            quantize_static(
                str(prepared),
                str(temporary),
                Reader(inputs),
                quant_format=QuantFormat.QDQ,
                op_types_to_quantize=_OPERATORS,
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                extra_options={"MatMulConstBOnly": True},
            )
        (folder / f"{graph.stem}_prepared.onnx").unlink(missing_ok=True)
        paths.append(path)
    return paths
