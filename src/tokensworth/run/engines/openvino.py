"""OpenVINO on a CPU."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import openvino
import torch
from torch import Tensor

from tokensworth.cascade import Cascade
from tokensworth.run.engines.graphs import stage_files
from tokensworth.run.engines.padding import Call

_HINTS = {None: "f32", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def open_graph(path: Path, dtype: torch.dtype | None = None) -> Call:
    """An ONNX file as a function of tensors; as many threads as PyTorch uses.

    Args:
        path: the file.
        dtype: what products are computed in, where the processor has it.
    """
    settings = {
        "INFERENCE_PRECISION_HINT": _HINTS[dtype],
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
    }
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(str(path)), "CPU", settings)
    request = compiled.create_infer_request()

    def call(inputs: Sequence[Tensor]) -> list[Tensor]:
        arrays = [x.contiguous().numpy() for x in inputs]
        # Outputs are copied: survivors outlive the next call.
        found = request.infer(arrays, share_inputs=True)
        return [torch.from_numpy(array) for array in found.values()]

    return call


def openvino_calls(cascade: Cascade, dtype: torch.dtype | None, graphs: Sequence[Path] | None) -> list[Call]:
    """Every stage as a compiled model."""
    if graphs is not None:
        return [open_graph(path, dtype) for path in graphs]
    with tempfile.TemporaryDirectory() as folder:
        return [open_graph(path, dtype) for path in stage_files(cascade, Path(folder))]
