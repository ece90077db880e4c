"""The backbone of `scripts/convert_saliency.py`'s DINOv2-small as a timm folder, for `train --task depth --encoder`.

python benchmarks/depth_encoder.py --weights dinov2_small_saliency.safetensors --size 154 --out encoder
"""

import argparse
from pathlib import Path

import torch

from saliency import SaliencyModel
from tokensworth.tokens import storage

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--size", type=int, default=154)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    options = {"num_classes": 0, "img_size": args.size, "dynamic_img_size": True}
    backbone = SaliencyModel.load(args.weights, args.size).backbone
    storage.save_pretrained(backbone, args.out, dtype=torch.float16, model_args=options)
