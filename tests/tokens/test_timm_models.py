"""Token methods on real architectures by name."""

import pytest
import torch
from torch.nn import functional as F

from timm_models import NAMES, images, make
from tokensworth.tokens import ToSA, adapt, list_methods, method_from_dict, restore

pytestmark = pytest.mark.filterwarnings("ignore:.*not fitted.*")


@pytest.mark.parametrize("name", NAMES)
def test_adapts_runs_differentiates_and_restores(name):
    model = make(name)
    x = images(model)
    with torch.no_grad():
        plain = model(x)
    for scope in ("layer", "per_head"):
        adapt(model, ToSA(layers=(2, 4), keep=1.0, scope=scope))
        with torch.no_grad():
            torch.testing.assert_close(model(x), plain, atol=1e-5, rtol=1e-5)
        restore(model)
    adapt(model, ToSA(layers=(2, 4), keep=0.5))
    loss = F.cross_entropy(model(x[:1]), torch.zeros(1, dtype=torch.long))
    loss.backward()
    assert model.blocks[1].attn.proj.weight.grad.isfinite().all()
    assert model.blocks[1].attn.proj.weight.grad.abs().max() > 0
    restore(model)
    with torch.no_grad():
        assert torch.equal(model(x), plain)


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(set(list_methods()) - {"tosa"}))
@pytest.mark.parametrize("name", NAMES)
def test_the_other_methods_run_and_restore(name, method):
    model = make(name, depth=2)
    x = images(model, 1)
    layers = {} if method in ("tome", "pitome") else {"layers": (1, 2)}
    with torch.no_grad():
        plain = model(x)
        adapt(model, method_from_dict({"name": method, **layers}))
        assert model(x).isfinite().all()
        torch._dynamo.reset()
        captured = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
        if method != "random":
            torch.testing.assert_close(captured, model(x), atol=1e-4, rtol=1e-4)
        restore(model)
        assert torch.equal(model(x), plain)


def _compiled(name: str, backend: str, scope: str = "layer") -> None:
    torch._dynamo.reset()
    model = adapt(make(name, depth=2), ToSA(layers=(2,), keep=0.5, scope=scope))
    x = images(model, 1)
    with torch.no_grad():
        expected = model(x)
        out = torch.compile(model, fullgraph=True, backend=backend)(x)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("scope", ["layer", "per_head"])
@pytest.mark.parametrize("name", NAMES)
def test_is_captured_as_one_graph(name, scope):
    _compiled(name, "aot_eager", scope)


@pytest.mark.parametrize(
    "name",
    [
        n if i < 2 else pytest.param(n, marks=pytest.mark.slow)
        for i, n in enumerate(
            (
                "deit_tiny_patch16_224",
                "vit_small_patch16_dinov3",
                *sorted(NAMES.keys() - {"deit_tiny_patch16_224", "vit_small_patch16_dinov3"}),
            )
        )
    ],
)
def test_compiles_with_the_inductor(name):
    _compiled(name, "inductor")
