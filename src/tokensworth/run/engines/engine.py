"""One interface over PyTorch, its compiler, ONNX Runtime and OpenVINO."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tokensworth.cascade import Cascade, Upstream
from tokensworth.errors import MissingExtraError, PolicyError
from tokensworth.run.engines.graphs import Ports, ports_of, stage_graphs, state_of
from tokensworth.run.engines.padding import Call, run_padded

ENGINES = ("torch", "compile", "onnx", "openvino")


class Engine(Protocol):
    """Runs one stage of a cascade."""

    def run_stage(self, index: int, images: Tensor, state: Upstream | None) -> tuple[Tensor, Upstream | None]:
        """As `Cascade.run_stage`: logits (B, classes), and what the next stage reuses."""
        ...


class TorchEngine:
    """The cascade itself, autocast to `dtype` where given."""

    def __init__(self, cascade: Cascade, dtype: torch.dtype | None) -> None:
        self.cascade, self.dtype = cascade, dtype

    def run_stage(self, index: int, images: Tensor, state: Upstream | None) -> tuple[Tensor, Upstream | None]:
        with torch.autocast(images.device.type, self.dtype, enabled=self.dtype is not None):
            return self.cascade.run_stage(index, images, state)


class GraphEngine:
    """One graph per stage, called with tensors alone, in batches of a few sizes.

    Args:
        cascade: whose stages they are.
        calls: one per stage.
    """

    def __init__(self, cascade: Cascade, calls: Sequence[Call]) -> None:
        self.ports: list[Ports] = ports_of(cascade)
        self.calls = list(calls)

    def run_stage(self, index: int, images: Tensor, state: Upstream | None) -> tuple[Tensor, Upstream | None]:
        ports = self.ports[index]
        taken: list[Any] = [] if state is None else [getattr(state, name) for name in ports.takes]
        logits, *given = run_padded(self.calls[index], [images, *taken])
        if index + 1 == len(self.ports):
            return logits, None
        return logits, state_of(images, dict(zip(ports.gives, given, strict=True)))


def _compiled(cascade: Cascade, dtype: torch.dtype | None) -> list[Call]:
    def one(graph: torch.nn.Module) -> Call:
        compiled = torch.compile(graph, dynamic=True)

        def call(inputs: Sequence[Tensor]) -> list[Tensor]:
            device = inputs[0].device.type
            with torch.no_grad(), torch.autocast(device, dtype, enabled=dtype is not None):
                return list(compiled(*inputs))

        return call

    return [one(graph) for graph, _ in stage_graphs(cascade)]


def make_engine(
    name: str, cascade: Cascade, dtype: torch.dtype | None = None, graphs: Sequence[Path] | None = None
) -> Engine:
    """An engine by its name.

    Args:
        name: one of `ENGINES`.
        cascade: the model.
        dtype: precision of products: autocast for PyTorch, a hint for OpenVINO; None for float32.
        graphs: ONNX files of the stages, where they were written before; else they are written to a temporary folder.

    Raises:
        PolicyError: an unknown engine, or a precision that it does not have.
        MissingExtraError: the engine is not installed.
    """
    if name == "torch":
        return TorchEngine(cascade, dtype)
    if name == "compile":
        return GraphEngine(cascade, _compiled(cascade, dtype))
    if name == "onnx":
        if dtype is not None:
            raise PolicyError(f"ONNX Runtime runs graphs as they were written, not in {dtype}; export them so")
        from tokensworth.run.engines.onnx import onnx_calls as make_calls
    elif name == "openvino":
        from tokensworth.run.engines.openvino import openvino_calls as make_calls
    else:
        raise PolicyError(f"unknown backend {name!r}; choose one of {', '.join(ENGINES)}")
    try:
        return GraphEngine(cascade, make_calls(cascade, dtype, graphs))
    except ImportError:
        raise MissingExtraError(f"the backend {name}", "export") from None
