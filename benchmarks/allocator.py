"""What keeping freed memory is worth: a plain timm model's time with and without, processes alternating.

python benchmarks/allocator.py [--model deit_small_patch16_224] [--batches 1 16 64]
"""

import argparse
import statistics
import subprocess
import sys

from common import finish

PROGRAM = """
import sys, timm, torch
from tokensworth.allocator import keep_freed_memory
from tokensworth.measure.timing import alternate
name, batch, repeats, keep = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "kept"
if keep:
    assert keep_freed_memory(), "the C library is not glibc, or the environment has decided"
model = timm.create_model(name).eval()
images = torch.randn(batch, *model.pretrained_cfg["input_size"])
with torch.inference_mode():
    print(alternate({"model": lambda: model(images)}, repeats)["model"].median)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit_small_patch16_224")
    parser.add_argument("--batches", nargs="+", type=int, default=(1, 16, 64))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rows, found = [], []
    for batch in options.batches:
        seconds: dict[str, list[float]] = {"kept": [], "given back": []}
        for _ in range(options.rounds):
            for how, into in seconds.items():
                arguments = [options.model, f"{batch}", f"{max(3, 60 // batch)}", how]
                done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True)
                if done.returncode:
                    sys.exit(done.stderr.strip().splitlines()[-1])
                into.append(float(done.stdout))
        kept, back = (1000 * statistics.median(seconds[how]) for how in ("kept", "given back"))
        rows.append((f"{batch}", f"{back:.1f}", f"{kept:.1f}", f"{100 * (1 - kept / back):.1f}"))
        found.append({"batch": batch, "seconds": seconds})
    header = ("batch", "given back, ms", "kept, ms", "saved %")
    finish("allocator", f"{options.model}: freed memory", header, rows, {"model": options.model, "runs": found})


if __name__ == "__main__":
    main()
