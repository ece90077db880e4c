"""STAR: the closed form, the relevance's conservation, and rates chosen from it."""

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from small import randomize
from tokensworth.errors import DataError, UnsupportedModelError
from tokensworth.tokens import adapt, method_from_dict, method_of
from tokensworth.tokens.methods.star import fused, star_of
from tokensworth.train.relevance import held, relevance
from tokensworth.train.star import fit_star

pytestmark = pytest.mark.filterwarnings("ignore:.*not fitted.*")
NAMES = ("deit_tiny_distilled_patch16_224", "vit_small_patch14_reg4_dinov2", "vit_base_patch16_siglip_gap_224")


def make(name: str = NAMES[0], bias: bool = False) -> nn.Module:
    torch.manual_seed(0)
    patch = int(name.split("_patch")[1][:2])
    model = timm.create_model(name, depth=4, embed_dim=64, num_heads=2, num_classes=5, img_size=8 * patch)
    randomize(model, 0.05)
    if not bias:
        with torch.no_grad():
            for key, value in model.named_parameters():
                if key.endswith("bias"):
                    value.zero_()
    return model


def photos(model: nn.Module, count: int = 3) -> torch.Tensor:
    return torch.randn(count, 3, *model.patch_embed.img_size, generator=torch.Generator().manual_seed(1))


@settings(max_examples=30, deadline=None)
@given(st.floats(0, 1), st.integers(0, 99))
def test_the_fusion_minimizes_its_objective(alpha, seed):
    torch.manual_seed(seed)
    p, q = (torch.rand(1, 12, dtype=torch.double) + 0.01 for _ in range(2))
    p, q = p / p.sum(), q / q.sum()

    def objective(r):
        return float((r * (r.log() - alpha * p.log() - (1 - alpha) * q.log())).sum())

    best = fused(p, q, alpha)
    assert float(best.sum()) == pytest.approx(1)
    for _ in range(20):
        other = best * (0.3 * torch.randn_like(best)).exp()
        assert objective(best) <= objective(other / other.sum()) + 1e-9


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_relevance_is_conserved_from_layer_to_layer(name, frozen):
    model = make(name).requires_grad_(not frozen)
    x = photos(model)
    with torch.no_grad():
        top = model(x).max(1).values
    for part in relevance(model, x, (1, 2, 3, 4, 5)):
        torch.testing.assert_close(part.sum(1), top, atol=1e-4, rtol=1e-3)
    with torch.no_grad(), held(model):
        # Held constant, the network still answers as before.
        torch.testing.assert_close(model(x).max(1).values, top, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        assert torch.equal(model(x).max(1).values, top)


def test_relevance_finds_the_patch_that_matters():
    """A model that looks at one patch alone."""
    model = make("vit_base_patch16_siglip_gap_224", bias=True)
    x = photos(model, 1).requires_grad_()
    for block in model.blocks:
        nn.init.zeros_(block.attn.proj.weight)  # tokens do not mix
        nn.init.zeros_(block.attn.proj.bias)
    model.head.weight.data.zero_()
    model.head.weight.data[0] = 1.0

    def answer(_):
        return tokens[0][:, 5].sum(1)

    tokens = []
    handle = model.blocks[-1].register_forward_hook(lambda _, __, out: tokens.append(out))
    (found,) = relevance(model, x.detach(), (2,), answer)
    handle.remove()
    assert found[0].abs().argmax() == 5
    assert (found[0] != 0).sum() == 1


def test_fitting():
    model = make()
    x = photos(model, 6)
    with pytest.raises(UnsupportedModelError, match="STAR"):
        fit_star(model, [x])
    adapt(model, method_from_dict({"name": "star", "layers": (2, 3), "keep": 0.7}))
    with pytest.warns(UserWarning, match="fit_star"), torch.no_grad():
        model(x)
    with pytest.raises(DataError, match="at least one"):
        fit_star(model, [])
    fit_star(model, [x])
    whole = star_of(model)[0].offline.clone()
    torch.testing.assert_close(whole.sum(1), torch.ones(2))
    found = fit_star(model, [(x[:2], torch.zeros(2)), (x[2:], torch.zeros(4))])
    torch.testing.assert_close(star_of(model)[0].offline, whole)
    assert (found.images, found.keep, found.mass) == (6, (0.7, 0.7), None)
    rates = [fit_star(model, [x], share=share) for share in (0.6, 0.8, 0.95)]
    assert [r.mass for r in rates] == sorted(r.mass for r in rates)
    for share, rate in zip((0.6, 0.8, 0.95), rates, strict=True):
        first, second = rate.keep[0], rate.keep[0] * rate.keep[1]
        assert (1.5 + first + 1.5 * second) / 4 == pytest.approx(share, abs=0.03)
    assert method_of(model).keep == rates[-1].keep
    with pytest.raises(DataError, match="can reach"):
        fit_star(model, [x], share=0.1)
