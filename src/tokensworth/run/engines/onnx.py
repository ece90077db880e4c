"""ONNX Runtime on a CPU."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import onnxruntime
import torch
from torch import Tensor

from tokensworth.cascade import Cascade
from tokensworth.run.engines.graphs import stage_files
from tokensworth.run.engines.padding import Call


def open_graph(path: Path) -> Call:
    """An ONNX file as a function of tensors; as many threads as PyTorch uses."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [port.name for port in session.get_inputs()]

    def call(inputs: Sequence[Tensor]) -> list[Tensor]:
        arrays = {name: x.contiguous().numpy() for name, x in zip(names, inputs, strict=True)}
        return [torch.from_numpy(array) for array in session.run(None, arrays)]

    return call


def onnx_calls(cascade: Cascade, dtype: torch.dtype | None, graphs: Sequence[Path] | None) -> list[Call]:
    """Every stage as a session."""
    if graphs is not None:
        return [open_graph(path) for path in graphs]
    with tempfile.TemporaryDirectory() as folder:
        return [open_graph(path) for path in stage_files(cascade, Path(folder))]
