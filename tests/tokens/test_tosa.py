"""ToSA's invariants on small models."""

import copy
import warnings
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from small import randomize
from tokensworth.errors import UnsupportedModelError
from tokensworth.tokens import ToSA, adapt, dense, method_of, restore, scoring, set_keep
from tokensworth.tokens.attention import attend, finish, project
from tokensworth.tokens.queries import block_queries
from tokensworth.tokens.scoring import scores_of
from tokensworth.tokens.selector import Selector
from tokensworth.tokens.tosa import recording, tosa_of

SCOPES = ("layer", "per_head")
KINDS = ("test_vit2", "test_vit3", "vit_small_patch16_dinov3", "eva02_tiny_patch14_224")


def small_vit(kind: str = "test_vit2") -> nn.Module:
    torch.manual_seed(5)
    sizes = {"embed_dim": 48, "num_heads": 3} if "test" in kind else {"embed_dim": 96, "num_heads": 3}
    model = timm.create_model(kind, depth=5, num_classes=7, img_size=112, **sizes)
    return randomize(model, 0.1)


def photos(count: int = 3) -> torch.Tensor:
    return torch.randn(count, 3, 112, 112, generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not fitted.*")
        yield


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scope", SCOPES)
@torch.no_grad()
def test_keep_everything_is_the_plain_model(kind, scope):
    model, x = small_vit(kind), photos()
    plain = model(x)
    adapt(model, ToSA(layers=(2, 4), keep=1.0, scope=scope))
    assert tosa_of(model)[0].layers["2"].pick() is None
    torch.testing.assert_close(model(x), plain, atol=1e-5, rtol=1e-5)
    set_keep(model, 0.4)
    assert (model(x) - plain).abs().max() > 1e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scope", SCOPES)
@torch.no_grad()
def test_restore_is_bit_equal(kind, scope):
    model, x = small_vit(kind), photos()
    plain, keys = model(x), list(model.state_dict())
    kinds = [type(part) for part in model.modules()]
    adapt(model, ToSA(layers=(2, 4), keep=0.5, scope=scope))
    model(x)
    with dense(model):
        torch.testing.assert_close(model(x), plain, atol=1e-5, rtol=1e-5)
    restore(model)
    assert torch.equal(model(x), plain)
    assert list(model.state_dict()) == keys
    assert [type(part) for part in model.modules()] == kinds
    assert method_of(model) is None


@given(
    st.permutations(range(4)), st.sampled_from(SCOPES), st.sampled_from((0.2, 0.5, 0.9)), st.sampled_from((0.0, 0.6))
)
@torch.no_grad()
def test_permuting_a_batch_permutes_the_results(order, scope, keep, mass):
    model = adapt(small_vit(), ToSA(layers=(2, 4), keep=keep, scope=scope, mass=mass))
    x = photos(4)
    torch.testing.assert_close(model(x[list(order)]), model(x)[list(order)], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mass", [0.0, 0.5])
@torch.no_grad()
def test_a_mask_of_the_same_tokens_gives_the_gathered_result(kind, mass):
    """Layer by layer, by a computation that gathers nothing."""
    for scope in SCOPES:
        model = adapt(small_vit(kind), ToSA(layers=(3,), keep=0.5, scope=scope, mass=mass))
        block = model.blocks[2]
        inputs: list = []
        handle = block.register_forward_pre_hook(
            lambda _, args, kw, seen=inputs: seen.append((args, kw)), with_kwargs=True
        )
        outputs: list = []
        after = block.register_forward_hook(lambda _, args, out, seen=outputs: seen.append(out))
        with recording(model) as chosen:
            model(photos())
        handle.remove()
        after.remove()
        (x,), options = inputs[0]
        rope = options.get("rope")
        mask = chosen[0][3].mask(x.shape[1])
        restore(model)
        hidden = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
        if scope == "layer":
            masked = block(x, attn_mask=hidden[:, None, None], **({} if rope is None else {"rope": rope}))
            expected = torch.where(mask[..., None], masked, x)
        else:
            kind_of, attn = type(block.attn), block.attn

            def masked_attention(self, x, rope=None, attn_mask=None, is_causal=False, hidden=hidden, mask=mask):
                q, k, v = project(self, x, rope)
                mixed = attend(self, q, k, v, hidden[:, :, None]) * mask[..., None]
                return finish(self, x, mixed)

            attn.__class__ = type("Masked", (kind_of,), {"forward": masked_attention})
            expected = block(x, **({} if rope is None else {"rope": rope}))
        torch.testing.assert_close(outputs[0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_plain_attention_equals_fused(kind):
    model, x = small_vit(kind), photos()
    adapt(model, ToSA(layers=(2, 4), keep=0.5, mass=0.7))
    fused = model(x)
    for block in model.blocks:
        block.attn.fused_attn = False
    torch.testing.assert_close(model(x), fused, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_the_unfitted_selector_predicts_the_current_map():
    x = photos()
    first = adapt(small_vit(), ToSA(layers=(2, 4), keep=0.5))(x)
    second = adapt(small_vit(), ToSA(layers=(2, 4), keep=0.5, scorer="current"))(x)
    torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-5)
    torch.manual_seed(1)
    other = adapt(small_vit(), ToSA(layers=(2, 4), keep=0.5, scorer="random"))(x)
    assert (first - other).abs().max() > 1e-4


def test_unfitted_selectors_warn_once():
    model = adapt(small_vit(), ToSA(layers=(2, 4)))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model(photos())
        model(photos())
    assert [str(w.message) for w in seen if "fit_selectors" in str(w.message)] != []
    assert len([w for w in seen if "fit_selectors" in str(w.message)]) == 1


@torch.no_grad()
def test_prefix_tokens_always_take_part_and_counts_are_exact():
    model = adapt(small_vit("vit_small_patch16_dinov3"), ToSA(layers=(2, 4), keep=(0.3, 0.6)))
    prefix, patches = model.num_prefix_tokens, 49
    with recording(model) as chosen:
        model(photos())
    for layer, keep in ((2, 0.3), (4, 0.6)):
        index = chosen[0][layer].places
        assert index[:, :prefix].tolist() == [list(range(prefix))] * 3
        assert index.shape[1] == prefix + round(keep * patches)
        assert all(len(set(row)) == len(row) for row in index.tolist())


@torch.no_grad()
def test_mass_keeps_as_few_tokens_as_it_takes():
    x = photos()
    whole = adapt(small_vit(), ToSA(layers=(2,), keep=1.0, mass=1.0))
    torch.testing.assert_close(whole(x), restore(whole)(x), atol=1e-5, rtol=1e-5)
    model = adapt(small_vit(), ToSA(layers=(2,), keep=1.0, mass=0.4))
    seen = {}
    layer = tosa_of(model)[0].layers["2"]
    choose = layer.choose
    layer.choose = lambda scores, _: seen.setdefault("chosen", choose(seen.setdefault("scores", scores)))
    model(x)
    del layer.choose
    scores = seen["scores"].mean(0)[:, 1:]
    for image, row in enumerate(scores):
        best = row.sort(descending=True).values.cumsum(0) / row.sum()
        wanted = int((best < 0.4 - 1e-6).sum()) + 1
        assert abs(int(seen["chosen"].valid[image].sum()) - 1 - wanted) <= 1
    # One image alone gets the same answer as in a batch with hungrier ones.
    torch.testing.assert_close(model(x[:1]), model(x)[:1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("scope", SCOPES)
def test_gradients_flow_with_and_without_checkpointing(scope, checkpointing):
    model = adapt(small_vit(), ToSA(layers=(2, 4), keep=0.5, scope=scope)).train()
    model(photos()).square().sum().backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert set(expected) == trained
    assert not any("token_method" in n for n in trained)
    if checkpointing:
        model.zero_grad()
        model.set_grad_checkpointing()
        model(photos()).square().sum().backward()
        for n, p in model.named_parameters():
            if n in expected:
                torch.testing.assert_close(p.grad, expected[n], atol=1e-5, rtol=1e-4)


def test_autocast_and_deepcopy():
    model = adapt(small_vit(), ToSA(layers=(2, 4), keep=0.5))
    adaptive = adapt(small_vit(), ToSA(layers=(2, 4), mass=0.5))
    copied = copy.deepcopy(model)
    set_keep(copied, 1.0)
    assert method_of(model).keep == 0.5
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert model(photos()).isfinite().all()
        assert adaptive(photos()).isfinite().all()
    with torch.no_grad():
        torch.testing.assert_close(copied(photos()), restore(model)(photos()), atol=1e-5, rtol=1e-5)


def test_half_precision_model():
    model = adapt(small_vit().to(torch.bfloat16), ToSA(layers=(2, 4), keep=0.5, mass=0.9))
    with torch.no_grad():
        assert model(photos().to(torch.bfloat16)).isfinite().all()


def test_dynamic_image_size():
    model = timm.create_model("test_vit2", depth=5, dynamic_img_size=True, num_classes=7).eval()
    adapt(model, ToSA(layers=(2, 4), keep=1.0))
    x = torch.randn(2, 3, 96, 208)
    with torch.no_grad():
        kept = model(x)
        with dense(model):
            torch.testing.assert_close(kept, model(x), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_intermediate_features_keep_the_whole_grid():
    model = adapt(small_vit(), ToSA(layers=(2, 4), keep=0.5))
    features = model.forward_intermediates(photos(), indices=[1, 3], intermediates_only=True)
    assert [tuple(f.shape) for f in features] == [(3, 48, 7, 7)] * 2


def test_ratios_stay_with_their_layers():
    assert ToSA(layers=(4, 2), keep=(0.3, 0.7)).keeps() == {2: 0.7, 4: 0.3}
    with pytest.raises(UnsupportedModelError, match="3 keep ratios for 2"):
        ToSA(layers=(4, 2), keep=(0.3, 0.7, 0.1))


def test_a_model_that_ran_in_inference_mode_can_be_copied_and_trained():
    model = adapt(small_vit(), ToSA(layers=(2, 4), keep=0.5))
    with torch.inference_mode():
        model(photos())
    copy.deepcopy(model).train()(photos()).sum().backward()
    model.train()(photos()).sum().backward()


def test_keep_can_be_set_for_some_layers():
    model = adapt(small_vit(), ToSA(layers=(2, 4), keep=0.5))
    set_keep(model, {4: 0.25})
    assert method_of(model).keeps() == {2: 0.5, 4: 0.25}
    for wrong in ({3: 0.5}, 0.0, 1.5, (0.5,)):
        with pytest.raises(UnsupportedModelError):
            set_keep(model, wrong)
    assert method_of(model).keeps() == {2: 0.5, 4: 0.25}


@pytest.mark.parametrize("layers", [(1,), (2, 3), (2, 2), (), (2, 6)])
def test_impossible_layers_are_refused(layers):
    model = small_vit()
    with pytest.raises(UnsupportedModelError, match="layer"):
        adapt(model, ToSA(layers=layers))
    assert method_of(model) is None


def test_other_models_are_refused_by_name():
    with pytest.raises(UnsupportedModelError, match=r"ResNet.*VisionTransformer"):
        adapt(timm.create_model("resnet10t"), ToSA())
    with pytest.raises(UnsupportedModelError, match="ParallelThingsBlock"):
        adapt(timm.create_model("vit_small_patch16_18x2_224", depth=4), ToSA(layers=(2,)))
    model = adapt(small_vit(), ToSA(layers=(2,)))
    with pytest.raises(UnsupportedModelError, match="already"):
        adapt(model, ToSA(layers=(4,)))


CPU = torch.device("cpu")


@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 5), st.integers(1, 40))
def test_scored_rows_are_means_that_stand_for_all_queries(height, width, prefix, count):
    queries = block_queries(height * width, width, prefix, count, CPU)
    assert queries.weights.sum() == prefix + height * width
    q = torch.randn(2, 3, prefix + height * width, 4)
    if queries.mean is None:
        assert count >= height * width
        assert queries.of(q) is q
        return
    rows = len(queries.mean) - prefix
    assert rows <= 2 * count
    if min(height, width) >= count:
        assert rows >= count / 2
    assert queries.weights.min() > 0
    torch.testing.assert_close(queries.mean.sum(1), torch.ones(prefix + rows))
    torch.testing.assert_close((queries.weights @ queries.mean)[0], torch.ones(prefix + height * width))
    torch.testing.assert_close(queries.of(q), queries.mean @ q)
    assert torch.equal(queries.of(q)[:, :, :prefix], q[:, :, :prefix])


def test_blocks_are_of_neighbours():
    mean = block_queries(16, 4, 1, 4, CPU).mean
    wanted = torch.zeros(5, 17)
    wanted[0, 0] = 1
    for row, start in enumerate((0, 2, 8, 10), 1):
        wanted[row, [1 + start, 2 + start, 5 + start, 6 + start]] = 0.25
    assert torch.equal(mean, wanted)


def test_attention_received_is_a_sum_over_all_queries():
    maps = torch.rand(2, 3, 20, 20, dtype=torch.double)
    torch.testing.assert_close(block_queries(18, 6, 2, 0, CPU).received(maps), maps.sum(2))
    alike = torch.rand(2, 3, 1, 20, dtype=torch.double).expand(-1, -1, 20, -1)
    queries = block_queries(18, 6, 2, 6, CPU)
    torch.testing.assert_close(queries.received(queries.of_map(alike)), alike.sum(2))


@given(st.integers(1, 9), st.integers(1, 3), st.sampled_from((1, 3, 5)), st.sampled_from((0, 4)), st.integers(0, 2))
def test_scores_by_pieces_equal_those_at_once(images, heads, kernel, count, prefix):
    selector = randomize(Selector(heads, 4 * heads, kernel), 0.5)
    q, k = torch.randn(2, images, heads, prefix + 12, 8)
    attn = SimpleNamespace(scale=0.35)
    queries = block_queries(12, 4, prefix, count, CPU)
    logits = queries.of_map(q @ k.mT * attn.scale)
    wanted = queries.received(selector(logits).exp())
    for size in (1, 2**13, 2**21):
        with patch.object(scoring, "_PIECE_BYTES", size), torch.no_grad():
            got = scores_of(selector, attn, q, k, None, queries)
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)
    hidden = torch.zeros(1, 1, 1, prefix + 12)
    hidden[..., -1] = float("-inf")
    masked = scores_of(None, attn, q, k, hidden.expand(-1, -1, prefix + 12, -1), queries)
    assert masked.isfinite().all()
    assert masked[..., -1].max() < 1e-6


@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_the_selector_is_two_convolutions(kernel):
    selector = randomize(Selector(3, 12, kernel), 0.5)
    logits = torch.randn(2, 3, 5, 17)
    rows = logits.transpose(1, 2).flatten(0, 1)
    hidden = F.conv1d(rows, selector.first.transpose(1, 2), selector.bias, padding=kernel // 2).relu()
    maps = F.conv1d(hidden, selector.second.unsqueeze(2))
    expected = maps.log_softmax(-1).unflatten(0, (2, 5)).transpose(1, 2)
    torch.testing.assert_close(selector(logits), expected, atol=1e-5, rtol=1e-5)
