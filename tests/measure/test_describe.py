"""What token methods cost, by hand."""

import pytest
import timm
import torch

from small import small_cascade
from tokensworth.errors import DataError, UnsupportedModelError
from tokensworth.measure.describe import describe
from tokensworth.measure.keeps import keep_frontier
from tokensworth.tokens import ToSA, adapt, method_of, restore

pytestmark = pytest.mark.filterwarnings("ignore:.*not fitted.*")


def test_deit_tiny_by_arithmetic():
    model = timm.create_model("deit_tiny_patch16_224").eval()
    plain = describe(model)
    assert (plain.method, plain.layers, plain.saved) == (None, (), 0)
    layers = (2, 4, 6, 8, 10)
    found = describe(adapt(model, ToSA(layers=layers, keep=0.8, rows=0)))
    assert found.dense_macs == plain.macs

    def layer(k: int) -> int:
        return 12 * 192 * 192 * k + 2 * k * k * 192

    # Logits of every row and head once more; convolutions of kernels 3 and 1 over 3 and 12 channels; and the sum over
    # the rows, which is a product too.
    selector = 197 * 197 * 192 + 197 * 197 * ((3 + 1) * 3 * 12 + 3)
    assert [x.selector_macs for x in found.layers] == [selector] * 5
    assert [(x.kept, x.tokens) for x in found.layers] == [(158, 197)] * 5
    assert found.dense_macs - found.macs == 5 * (layer(197) - layer(158) - selector)


def test_an_adaptive_keep_ratio_counts_the_most_it_can_cost():
    model = timm.create_model("test_vit2", depth=4).eval()
    bound = describe(adapt(model, ToSA(layers=(2, 4), keep=0.6))).macs
    restore(model)
    assert describe(adapt(model, ToSA(layers=(2, 4), keep=0.6, mass=0.1))).macs == bound
    assert method_of(model).mass == 0.1


def test_a_cascade_is_described_as_a_whole():
    model = small_cascade()
    plain = describe(model).macs
    found = describe(adapt(model, ToSA(layers=(2,), keep=0.5)))
    assert found.dense_macs == plain
    assert [x.name for x in found.layers] == ["stage 1, layer 2", "stage 2, layer 2", "stage 3, layer 2"]


def test_a_frontier_of_keep_ratios():
    model = timm.create_model("test_vit2", depth=4, num_classes=3, img_size=64).eval()
    batches = [(torch.randn(6, 3, 64, 64), torch.randint(0, 3, (6,)))]
    with pytest.raises(UnsupportedModelError, match="adapt"):
        keep_frontier(model, batches)
    adapt(model, ToSA(layers=(2, 4), keep=0.7))
    points = keep_frontier(model, batches, (1.0, 0.5), batch_size=4, repeats=1)
    assert [p.keep for p in points] == [None, 1.0, 0.5]
    assert points[2].macs < points[0].macs < points[1].macs
    assert points[0].accuracy == points[1].accuracy
    assert all(p.millis > 0 for p in points)
    assert method_of(model).keep == 0.7
    assert keep_frontier(model, [batches[0][0]], (0.5,), batch_size=9, repeats=1)[1].accuracy is None
    with pytest.raises(DataError):
        keep_frontier(model, [])
