"""Counts against the papers, and against the authors' code for the three released models."""

import pytest
import timm
import torch

from tokensworth.cascade import Cascade, CascadeConfig
from tokensworth.measure.macs import count_macs, model_macs, stage_macs

T2T = {7: 1.147, 10: 1.516, 12: 1.763, 14: 4.784, 19: 8.480, 24: 13.66}
RELEASED = {
    "t2t_vit_12": (0.468, 0.978, 2.009),
    "t2t_vit_14": (1.201, 2.618, 5.446),
    "deit_small_patch16_224": (1.143, 2.500, 5.158),
}


@pytest.mark.parametrize(("name", "macs"), [("deit_tiny_patch16_224", 1.254e9), ("deit_small_patch16_224", 4.60e9)])
def test_deit(name, macs):
    assert model_macs(timm.create_model(name), 224) == pytest.approx(macs, rel=0.002)


@pytest.mark.parametrize("depth", [7, 10, 12, pytest.param(14, marks=pytest.mark.slow), 19, 24])
def test_t2t(depth):
    assert model_macs(Cascade(CascadeConfig(f"t2t_vit_{depth}", (14,), 1000)), 224) == pytest.approx(
        T2T[depth] * 1e9, rel=0.002
    )


def test_t2t_of_few_tokens():
    assert model_macs(Cascade(CascadeConfig("t2t_vit_12", (7,), 1000)), 224) == pytest.approx(0.468e9, rel=0.002)


@pytest.mark.parametrize("name", RELEASED)
def test_stages_of_the_released_models(name):
    stages = stage_macs(Cascade.from_timm(name, (7, 10, 14), 1000))
    assert [s.total for s in stages] == [pytest.approx(macs * 1e9, rel=0.02) for macs in RELEASED[name]]
    for stage in stages[1:]:
        assert stage.wider > 0
        assert stage.plain + stage.feature + stage.relation + stage.wider == stage.total


def test_fused_attention_is_counted_with_and_without_a_mask():
    q, mask = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 5)
    attention = torch.nn.functional.scaled_dot_product_attention
    wanted = 2 * 3 * 2 * 5 * 5 * 4
    assert count_macs(lambda: attention(q, q, q)) == wanted
    assert count_macs(lambda: attention(q, q, q, mask)) == wanted
