"""Photographs beside the depth that models see in them, as one picture: a row for each photo, a column for each model.

python benchmarks/depth_photos.py PHOTO... --model plain --model tosa_0.8 --out docs/depth.jpg
"""

import argparse
import subprocess
import tempfile
from pathlib import Path

from PIL import Image

HEIGHT = 180


def tile(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB").resize((round(image.width * HEIGHT / image.height), HEIGHT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path, nargs="+")
    parser.add_argument("--model", action="append", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    for photo in options.photos:
        row = [tile(photo)]
        for model in options.model:
            with tempfile.TemporaryDirectory() as folder:
                subprocess.run(["tokensworth", "depth", photo, "--model", model, "--out", folder], check=True)
                row.append(tile(next(Path(folder).rglob("*_coloured.png"))))
        rows.append(row)
    gap = 4
    size = max(sum(t.width + gap for t in row) for row in rows), len(rows) * (HEIGHT + gap)
    sheet = Image.new("RGB", size, "white")
    for place, row in enumerate(rows):
        left = 0
        for part in row:
            sheet.paste(part, (left, place * (HEIGHT + gap)))
            left += part.width + gap
    sheet.save(options.out, quality=85)


if __name__ == "__main__":
    main()
