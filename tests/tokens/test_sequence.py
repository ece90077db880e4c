"""Sequences that grow shorter, and what is known of their tokens."""

import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokensworth.tokens import adapt, method_from_dict, restore
from tokensworth.tokens.method import adapted_vits
from tokensworth.tokens.methods.tome import most_similar
from tokensworth.tokens.sequence import Tokens, first_rows


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(0, 3), st.integers(6, 30), st.data())
def test_merging_conserves_what_the_tokens_hold(images, prefix, patches, data):
    count = data.draw(st.integers(1, patches // 2))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    tokens = prefix + patches
    x, sizes = torch.randn(images, tokens, 8), torch.randint(1, 5, (images, tokens)).float()
    keys = torch.randn(images, 2, tokens, 4)
    kept, merged, into = most_similar(keys, count, prefix)
    whole = first_rows(tokens, x)
    after = Tokens(x.clone(), patches, None, sizes, whole).merge(kept, merged, into)
    # Nothing is lost: sizes and size-weighted sums stay; and each first token is found where it went.
    torch.testing.assert_close(after.sizes.sum(1), sizes.sum(1))
    torch.testing.assert_close((after.x * after.sizes[..., None]).sum(1), (x * sizes[..., None]).sum(1))
    assert after.x.shape[1] == tokens - count
    for image in range(images):
        for row in range(tokens - count):
            of = after.source[image] == row
            weights = sizes[image, of]
            mean = (x[image, of] * weights[:, None]).sum(0) / weights.sum()
            torch.testing.assert_close(after.x[image, row], mean, atol=1e-5, rtol=1e-5)
    # Prefix tokens stay first, untouched and alone.
    assert torch.equal(kept[:, :prefix], first_rows(prefix, kept))
    assert torch.equal(after.x[:, :prefix], x[:, :prefix])


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(0, 3), st.integers(6, 20), st.data())
def test_the_most_similar_pairs_by_hand(images, prefix, patches, data):
    count = data.draw(st.integers(1, patches // 2))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    keys = torch.randn(images, 3, prefix + patches, 4, dtype=torch.double)
    kept, merged, into = most_similar(keys, count, prefix)
    metric = torch.nn.functional.normalize(keys.mean(1), dim=-1)
    for image in range(images):
        places = range(prefix, prefix + patches)
        best = {}
        for a in (p for p in places if p % 2 == 0):
            cosines = {b: float(metric[image, a] @ metric[image, b]) for b in places if b % 2 == 1}
            best[a] = max(cosines, key=cosines.get), max(cosines.values())
        wanted = sorted(best, key=lambda a: -best[a][1])[:count]
        assert sorted(merged[image].tolist()) == sorted(wanted)
        assert [best[a][0] for a in merged[image].tolist()] == into[image].tolist()
        rest = [p for p in range(prefix + patches) if p not in wanted]
        line = sorted(rest, key=lambda p: (p >= prefix, p % 2 if p >= prefix else 0, p))
        assert kept[image].tolist() == line


@torch.no_grad()
def test_unmerge_gives_the_whole_grid_back():
    torch.manual_seed(0)
    model = timm.create_model("vit_small_patch14_reg4_dinov2", depth=3, embed_dim=64, num_heads=2, img_size=112).eval()
    x = torch.randn(2, 3, 112, 112)
    plain = model.forward_features(x)
    adapt(model, method_from_dict({"name": "tome", "r": 0, "unmerge": True}))
    torch.testing.assert_close(model.forward_features(x), plain, atol=1e-5, rtol=1e-5)
    restore(model)
    adapt(model, method_from_dict({"name": "tome", "r": 10}))
    short = model.forward_features(x)
    restore(model)
    adapt(model, method_from_dict({"name": "tome", "r": 10, "unmerge": True}))
    held = []
    adapted_vits(model)[0][1].record = lambda layer, tokens: held.append(tokens.source)
    whole = model.forward_features(x)
    assert whole.shape == plain.shape
    assert short.shape[1] == plain.shape[1] - 30
    # Each place holds the very token that it was merged into.
    for image in range(2):
        assert torch.equal(whole[image], short[image][held[-1][image]])
    assert torch.equal(whole[:, :5], short[:, :5])
