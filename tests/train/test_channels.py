"""VTC-LFC's channel pruning: tensors shrink, MACs fall, the right channels stay."""

import pytest
import timm
import torch

from small import randomize
from tokensworth.errors import UnsupportedModelError
from tokensworth.measure.describe import describe
from tokensworth.tokens import adapt, method_from_dict, method_of, restore
from tokensworth.tokens.method import adapted_vits
from tokensworth.tokens.storage import from_pretrained, save_pretrained
from tokensworth.train.channels import channel_sensitivity, low_pass, prune_channels
from tokensworth.train.loop import Recipe, _parameter_groups

TOKENS = {"name": "vtc_lfc", "layers": (2, 3), "keep": 1.0}


def make():
    torch.manual_seed(0)
    model = timm.create_model("deit_tiny_patch16_224", depth=4, embed_dim=64, num_heads=2, num_classes=5, img_size=128)
    return randomize(model, 0.05)


def photos(count=3):
    return torch.randn(count, 3, 128, 128, generator=torch.Generator().manual_seed(1))


def test_a_low_pass_keeps_what_is_low():
    rows = torch.arange(32)
    slow, fast = ((2 * torch.pi * f * rows / 32).cos().expand(1, 3, 32, 32) for f in (1, 12))
    passed = low_pass(slow + fast + 5, 0.25)
    torch.testing.assert_close(passed, slow * 0.969 + 5, atol=2e-2, rtol=0)


def test_channels_are_pruned_saved_and_restored(tmp_path):
    model = make()
    x = photos()
    with torch.no_grad():
        assert model(x).isfinite().all()
    adapt(model, method_from_dict(TOKENS))
    before = describe(model).macs
    with torch.no_grad():
        for block in model.blocks:  # half of the channels do nothing at all
            block.mlp.fc2.weight[:, ::2] = 0
        without = model(x)
    widths = prune_channels(model, [x], 0.5)
    assert sum(widths) == pytest.approx(0.5 * 4 * 256, abs=4)
    with torch.no_grad():
        torch.testing.assert_close(model(x), without, atol=1e-5, rtol=1e-5)
    # Two products of 65 tokens by 64 channels for each hidden channel that is left out.
    assert before - describe(model).macs == 2 * 65 * 64 * (4 * 256 - sum(widths))
    save_pretrained(model, tmp_path)
    again = from_pretrained(tmp_path)
    assert method_of(again).hidden == widths
    with torch.no_grad():
        assert torch.equal(again(x), model(x))
        restored = restore(model)(x)
        assert torch.equal(restored, model(x))
        torch.testing.assert_close(restored, without, atol=1e-5, rtol=1e-5)  # keep = 1 changes the order alone
        assert model.blocks[0].mlp.fc1.out_features == 256


def test_what_is_pruned_is_trained_as_the_backbone_is():
    model = adapt(make(), method_from_dict({**TOKENS, "hidden": (64, 256, 128, 200)}))
    narrow = {id(p) for p in adapted_vits(model)[0][1].narrow.parameters()}
    assert len(narrow) == 3 * 4
    groups = _parameter_groups(model, Recipe())
    assert not any(id(p) in narrow for g in groups if g["lr_scale"] != 1 for p in g["params"])
    model.train()(photos()).sum().backward()
    assert adapted_vits(model)[0][1].narrow["1"].fc1.weight.grad.abs().max() > 0
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model.eval(), fullgraph=True, backend="aot_eager")(photos())
        torch.testing.assert_close(compiled, model(photos()), atol=1e-4, rtol=1e-4)


def test_the_sensitivity_by_finite_differences():
    model = adapt(make().double(), method_from_dict(TOKENS))
    x = photos(1).double()
    scores = channel_sensitivity(model, [x])[3]
    quiet = scores.argsort()[:3]
    loud = scores.argsort(descending=True)[:3]
    with torch.no_grad():
        inner = low_pass(x, 0.25)
        label = model(inner).argmax(1)

        def loss(channels):
            weight = model.blocks[3].mlp.fc2.weight
            before = weight.clone()
            weight[:, channels] = 0
            value = torch.nn.functional.cross_entropy(model(inner), label)
            weight.copy_(before)
            return value

        base = loss([])
        assert (loss(loud) - base).abs() > (loss(quiet) - base).abs()


def test_wrong_use_is_refused():
    with pytest.raises(UnsupportedModelError, match="VTCLFC"):
        prune_channels(make(), [photos()], 0.5)
    model = adapt(make(), method_from_dict(TOKENS))
    with pytest.raises(UnsupportedModelError, match="not 0"):
        prune_channels(model, [photos()], 0.0)
    restore(model)
    with pytest.raises(UnsupportedModelError, match="hidden widths"):
        adapt(model, method_from_dict({**TOKENS, "hidden": (3, 3)}))
    assert method_of(model) is None
