"""The NeWCRFs decoder against the authors' outputs, in the published sizes."""

import json

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from golden import DATA, golden_weight
from tokensworth.dense.newcrfs import NeWCRFs
from tokensworth.errors import UnsupportedModelError

CHANNELS, WIDTHS = (192, 384, 768, 1536), (128, 256, 512, 1024)


@pytest.fixture(scope="module")
def decoder():
    """The published "large", with the weights of the golden file's rule under the authors' names."""
    model = NeWCRFs(CHANNELS, WIDTHS, 512, max_depth=10.0).eval()
    shapes = json.loads((DATA / "newcrfs_large_decoder.shapes.json").read_text())
    own = model.state_dict()
    assert {name: list(value.shape) for name, value in own.items()} == shapes
    state = {}
    for name, shape in shapes.items():
        if not own[name].is_floating_point():
            state[name] = own[name]
        elif name.endswith((".bn.weight", ".gn.weight")):
            state[name] = torch.ones(shape)
        elif name.endswith("running_var"):
            state[name] = 0.5 * golden_weight(name, shape).abs() + 0.5
        else:
            state[name] = golden_weight(name, shape)
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize(("height", "width"), [(224, 224), (256, 320)])
def test_the_decoder_agrees_with_the_authors(decoder, height, width):
    maps = [
        np.random.RandomState(10 + i).standard_normal((1, c, height // (4 * 2**i), width // (4 * 2**i)))
        for i, c in enumerate(CHANNELS)
    ]
    with torch.inference_mode():
        quarter = decoder([torch.from_numpy(m.astype(np.float32)) for m in maps])
        depth = F.interpolate(quarter, scale_factor=4, mode="bilinear", align_corners=False).numpy()
    wanted = np.load(DATA / "newcrfs_large_decoder.npz")[f"{height}x{width}"]
    assert np.abs(depth.reshape(wanted.shape) - wanted).max() < 1e-3


def test_a_batch_is_its_images():
    torch.manual_seed(0)
    model = NeWCRFs((32, 64, 64, 96), (32, 32, 64, 96), 16, 10.0).eval()
    maps = [torch.randn(3, c, 40 // 2**i, 24 // 2**i) for i, c in enumerate((32, 64, 64, 96))]
    with torch.inference_mode():
        together = model(maps)
        alone = torch.cat([model([m[i : i + 1] for m in maps]) for i in range(3)])
    assert together.shape == (3, 1, 40, 24)
    assert torch.allclose(together, alone, atol=1e-5)


def test_widths_that_cannot_be_are_refused():
    with pytest.raises(UnsupportedModelError, match="multiples of 32"):
        NeWCRFs((32,) * 4, (32, 32, 32, 40), 16, 10.0)
    with pytest.raises(UnsupportedModelError, match="even"):
        NeWCRFs((32,) * 4, (32,) * 4, 15, 10.0)
