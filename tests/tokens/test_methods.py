"""What every token method must do, whatever it does."""

import copy

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

from small import randomize, small_cascade
from tokensworth.cascade import Cascade
from tokensworth.errors import UnsupportedModelError
from tokensworth.measure.describe import describe
from tokensworth.tokens import Method, adapt, list_methods, method_from_dict, method_of, restore
from tokensworth.tokens.method import adapted_vits, dense, method_penalties
from tokensworth.tokens.storage import from_pretrained, save_pretrained

pytestmark = pytest.mark.filterwarnings("ignore:.*not fitted.*")

_PRUNING = {"layers": (2, 3), "keep": 0.6}
# Options under which a model of four layers drops, merges or passes by a good part of its tokens; and none.
OPTIONS = {
    "dynamicvit": _PRUNING,
    "evit": _PRUNING,
    "pitome": {"keep": 0.8},
    "random": _PRUNING,
    "star": _PRUNING,
    "svit": {"layers": (2, 3, 4), "keep": 0.5, "bias": 0.0},
    "tome": {"r": 6},
    "topk": _PRUNING,
    "tosa": {"layers": (2, 4), "keep": 0.5},
    "vtc_lfc": _PRUNING,
}
NEUTRAL = {name: {**options, "keep": 1.0} for name, options in OPTIONS.items()}
NEUTRAL |= {"tome": {"r": 0}, "svit": {"layers": (2, 3, 4), "bias": 100.0}}
# Real architectures made narrow, and what each brings.
MODELS = {
    "deit_tiny_distilled_patch16_224": "class and distillation token, two heads",
    "vit_base_patch16_rpn_224": "norms after the branches, average pooling, no class token",
    "vit_small_patch14_reg4_dinov2": "LayerScale, registers",
    "vit_small_patch16_dinov3": "rotary positions, registers",
    "eva02_tiny_patch14_224": "rotary positions, SwiGLU",
    "vit_base_patch16_siglip_224": "attention pooling, no class token",
    "vit_small_patch16_rope_mixed_224": "rotary positions of each layer and head",
}
# Compiling takes seconds: each method on two models, two methods on all of them, the other pairs in `make test-full`.
_CAPTURED = [
    pytest.param(name, model, marks=[] if place in (0, 3) or name in ("tome", "svit") else pytest.mark.slow)
    for name in OPTIONS
    for place, model in enumerate(MODELS)
]
methods = pytest.mark.parametrize("name", OPTIONS)
models = pytest.mark.parametrize("model_name", MODELS)


def options_of(name: str, **more) -> Method:
    return method_from_dict({"name": name, **OPTIONS[name], **more})


def make(model_name: str = "deit_tiny_distilled_patch16_224") -> nn.Module:
    torch.manual_seed(0)
    patch = int(model_name.split("_patch")[1][:2])
    model = timm.create_model(model_name, depth=4, embed_dim=64, num_heads=2, num_classes=5, img_size=8 * patch)
    return randomize(model, 0.05)  # LayerScale too, which starts next to nothing


def photos(model: nn.Module, count: int = 3) -> torch.Tensor:
    height, width = model.patch_embed.img_size
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(1))


def adapted(name: str, model_name: str = "deit_tiny_distilled_patch16_224", **more) -> nn.Module:
    model = adapt(make(model_name), options_of(name, **more))
    for _, added in adapted_vits(model):
        randomize(added, 0.3)  # gates and predictors that tell tokens apart
    return model.eval()


def test_the_list_is_complete():
    assert list_methods() == sorted(OPTIONS)


@models
@methods
def test_runs_differentiates_and_restores(name, model_name):
    exact = make(model_name).double()
    x = photos(exact)
    with torch.no_grad():
        plain = exact(x.double())
        adapt(exact, method_from_dict({"name": name, **NEUTRAL[name]}))
        torch.testing.assert_close(exact(x.double()), plain, atol=1e-5, rtol=1e-5)
    model = adapted(name, model_name)
    with torch.no_grad():
        plain = make(model_name)(x)
        out = model(x)
        assert out.isfinite().all()
        assert not torch.allclose(out, plain, atol=1e-4)
        with dense(model):
            assert torch.equal(model(x), plain)
    model.train()
    loss = F.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long)) + sum(method_penalties(model))
    loss.backward()
    for block in model.blocks:
        assert block.attn.proj.weight.grad.isfinite().all()
        assert block.attn.proj.weight.grad.abs().max() > 0
    restore(model.eval())
    with torch.no_grad():
        assert torch.equal(model(x), plain)


@methods
@torch.no_grad()
def test_it_costs_less_and_says_so(name):
    if name == "svit":
        pytest.skip("what SViT costs depends on the image; `describe` counts the most")
    cost = describe(adapt(make("vit_small_patch16_dinov3"), options_of(name)))
    assert cost.method == {**options_of(name).to_dict()}
    assert cost.macs < cost.dense_macs
    assert cost.layers
    assert all(layer.kept < layer.tokens for layer in cost.layers)


@methods
@torch.no_grad()
def test_a_permuted_batch_permutes_the_results(name):
    if name == "random":
        pytest.skip("random tokens follow the batch")
    model = adapted(name)
    x = photos(model, 5)
    order = torch.tensor([3, 0, 4, 1, 2])
    torch.testing.assert_close(model(x[order]), model(x)[order], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat([model(x[i : i + 1]) for i in range(5)]), model(x), atol=1e-5, rtol=1e-5)


@methods
def test_gradient_checkpointing_gives_the_same_gradients(name):
    grads = []
    for checkpointing in (False, True):
        model = adapted(name, "vit_small_patch16_dinov3").train()
        model.set_grad_checkpointing(checkpointing)
        torch.manual_seed(3)
        (model(photos(model)).square().mean() + sum(method_penalties(model))).backward()
        grads.append(model.blocks[0].attn.proj.weight.grad)
    torch.testing.assert_close(*grads, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("name", "model_name"), _CAPTURED)
@torch.no_grad()
def test_is_captured_as_one_graph(name, model_name):
    torch._dynamo.reset()
    model = adapted(name, model_name)
    x = photos(model, 2)
    torch.manual_seed(5)
    expected = model(x)
    torch.manual_seed(5)
    torch.testing.assert_close(
        torch.compile(model, fullgraph=True, backend="aot_eager")(x), expected, atol=1e-4, rtol=1e-4
    )


@methods
def test_autocast_and_its_graph(name):
    torch._dynamo.reset()
    model = adapted(name)
    x = photos(model, 2)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().square().mean()
        loss.backward()
        with torch.no_grad():
            out = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    assert model.blocks[0].attn.proj.weight.grad.isfinite().all()
    assert out.isfinite().all()


@methods
@torch.no_grad()
def test_is_saved_and_loaded(name, tmp_path):
    model = adapted(name)
    save_pretrained(model, tmp_path)
    again = from_pretrained(tmp_path)
    assert method_of(again) == options_of(name)
    x = photos(model)
    torch.manual_seed(0)
    expected = model(x)
    torch.manual_seed(0)
    torch.testing.assert_close(again(x), expected, atol=1e-6, rtol=1e-6)


@methods
def test_a_copy_taken_at_any_time(name):
    model = adapted(name).train()
    x = photos(model)
    model(x)
    twin = copy.deepcopy(model).eval()
    model.eval()
    with torch.inference_mode():
        torch.manual_seed(0)
        expected = model(x)
        torch.manual_seed(0)
        assert torch.equal(twin(x), expected)
    model.train()(x).sum().backward()
    restore(twin)
    assert method_of(twin) is None
    assert method_of(model) is not None


@methods
@torch.no_grad()
def test_cascades(name, tmp_path):
    leaning = small_cascade()
    if name != "tosa":
        with pytest.raises(UnsupportedModelError, match="reuse"):
            adapt(leaning, options_of(name))
        assert method_of(leaning) is None
    apart = small_cascade(grids=(8,))
    layers = {"layers": (2,)} if "layers" in OPTIONS[name] else {}
    apart = adapt(apart, options_of(name, **layers))
    apart.save_pretrained(tmp_path)
    x = torch.randn(2, 3, 32, 32)
    torch.manual_seed(0)
    expected = apart(x)[-1]
    torch.manual_seed(0)
    torch.testing.assert_close(Cascade.from_pretrained(tmp_path)(x)[-1], expected, atol=1e-6, rtol=1e-6)


@methods
def test_wrong_options_are_refused_in_one_line(name):
    wrong = {"r": -1} if name == "tome" else {"keep": 0.0}
    with pytest.raises(UnsupportedModelError, match=name if name != "tosa" and name != "tome" else "keep|r -1"):
        options_of(name, **wrong)
    with pytest.raises(UnsupportedModelError, match="options do not fit"):
        options_of(name, nonsense=1)
    if "layers" in OPTIONS[name]:
        model = make()
        with pytest.raises(UnsupportedModelError, match="layer 9"):
            adapt(model, options_of(name, layers=(2, 9)))
        assert method_of(model) is None
