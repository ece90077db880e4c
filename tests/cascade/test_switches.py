"""Every switch changes the output, and the grids, sizes and pretrained starts do what they promise."""

from dataclasses import replace

import pytest
import timm
import torch

import tokensworth as tw
from small import SIZES, randomize, small_cascade, small_config
from tokensworth.cascade import Cascade, CascadeConfig, Reuse

SWITCHES = {
    "feature off": {"feature": "off"},
    "feature of each layer": {"feature": "each"},
    "class token": {"class_token": True},
    "relation off": {"relation": "off"},
    "relation of the matching layer": {"relation": "matching"},
    "naive upsampling": {"upsample": "naive"},
    "separate norm": {"joint_norm": False},
    "learned weighting": {"weighting": True},
}


def _copy_what_fits(source: torch.nn.Module, target: torch.nn.Module) -> None:
    mine, theirs = target.state_dict(), source.state_dict()
    target.load_state_dict({k: theirs[k] if k in theirs and theirs[k].shape == v.shape else v for k, v in mine.items()})


@pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES.keys())
def test_every_switch_changes_the_later_exits_only(switch):
    base = small_cascade()
    other = Cascade(replace(base.config, reuse=replace(base.config.reuse, **switch)))
    randomize(other)
    _copy_what_fits(base, other)
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        a, b = base(images), other(images)
    # Without relations to hand on, the first stage takes the fused path.
    assert torch.allclose(a[0], b[0], atol=1e-5)
    for first, second in zip(a[1:], b[1:], strict=True):
        assert (first - second).abs().max() > 1e-4


def test_equal_weights_of_own_and_reused_relations_are_the_plain_sum():
    base = small_cascade()
    other = Cascade(replace(base.config, reuse=replace(base.config.reuse, weighting=True))).eval()
    _copy_what_fits(base, other)
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        for first, second in zip(base(images), other(images), strict=True):
            assert torch.allclose(first, second, atol=1e-5)


def test_training_and_inference_paths_of_attention_agree():
    model, images = small_cascade(), torch.randn(3, 3, 32, 32)
    with torch.inference_mode():
        fast = model(images)
    for slow, quick in zip(model(images), fast, strict=True):
        assert torch.allclose(slow, quick, atol=1e-5)


def test_relations_transformed_in_pieces_agree_with_all_at_once(monkeypatch):
    model, images = small_cascade(), torch.randn(3, 3, 32, 32)
    with torch.inference_mode():
        whole = model(images)
        for size in (64, 4096, 100_000):
            monkeypatch.setattr("tokensworth.cascade.reuse._CHUNK_BYTES", size)
            for a, b in zip(model(images), whole, strict=True):
                assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("grids", [(4, 8), (3, 4, 6, 10), (3, 5, 8, 11, 16)])
def test_any_number_of_stages(grids):
    model = small_cascade(grids)
    with torch.inference_mode():
        assert [tuple(x.shape) for x in model(torch.randn(2, 3, 32, 32))] == [(2, 4)] * len(grids)


def test_permuting_a_batch_permutes_the_results():
    model, images, order = small_cascade(), torch.randn(5, 3, 32, 32), torch.randperm(5)
    with torch.inference_mode():
        for plain, mixed in zip(model(images), model(images[order]), strict=True):
            assert torch.allclose(plain[order], mixed, atol=1e-5)


def test_invalid_grids_name_the_nearest_valid_ones():
    with pytest.raises(tw.InvalidGridError, match="no 7x7 grid from 32 px; nearest valid: 5, 6, 8"):
        Cascade(small_config((3, 7)))
    with pytest.raises(tw.InvalidGridError, match="nearest valid: 7, 10, 14"):
        Cascade(CascadeConfig("t2t_vit_7", (9, 14), 10))
    with pytest.raises(tw.InvalidGridError, match="must grow"):
        small_config((8, 3))
    with pytest.raises(tw.InvalidGridError, match="whole numbers"):
        small_config((0, 3))
    with pytest.raises(tw.InvalidGridError, match="at least two"):
        Cascade.from_timm("deit_tiny_patch16_224", (7,), 10)


def test_unknown_and_unfit_backbones_are_refused_by_name():
    with pytest.raises(tw.UnsupportedModelError, match="no model 'vit_nonsense'"):
        Cascade.from_timm("vit_nonsense", (7, 14), 10)
    with pytest.raises(tw.UnsupportedModelError, match="is a Eva"):
        Cascade.from_timm("eva02_tiny_patch14_224", (7, 14), 10)


def test_a_patch_stem_resizes_the_image_for_other_grids():
    args = {"embed_dim": 32, "depth": 1, "num_heads": 2}
    model = Cascade.from_timm("vit_tiny_patch16_224", (4, 9), 10, backbone_args=args)
    assert model.config.mean == (0.5, 0.5, 0.5)  # this backbone's own, not ImageNet's
    assert [s.vit.patch_embed.resize.size for s in model.stages] == [(64, 64), (144, 144)]
    assert [x.shape for x in model(torch.randn(1, 3, 224, 224))] == [(1, 10), (1, 10)]


@pytest.mark.parametrize("stem", ["t2t", "t2t_softmax"])
def test_t2t_stems_serve_small_images(stem):
    config = CascadeConfig("vit", (4, 8), 4, image_size=32, stem=stem, backbone_args=SIZES)
    assert [x.shape for x in Cascade(config)(torch.randn(2, 3, 32, 32))] == [(2, 4), (2, 4)]


def test_register_tokens_pass_through_both_reuses():
    model = small_cascade()
    config = replace(model.config, backbone_args={**SIZES, "reg_tokens": 2})
    other = Cascade(config)
    randomize(other)
    assert other.stages[1].vit.num_prefix_tokens == 3
    assert [x.shape for x in other(torch.randn(2, 3, 32, 32))] == [(2, 4)] * 3


@pytest.fixture
def offline_pretrained(monkeypatch):
    """timm's pretrained loading, with weights from memory instead of a download."""
    torch.manual_seed(5)
    weights = timm.create_model("deit_tiny_patch16_224", depth=2)
    randomize(weights, 0.05)
    state = weights.state_dict()

    def load(model, *args, **kwargs):
        from timm.models.vision_transformer import checkpoint_filter_fn

        kept = {k: v for k, v in state.items() if not k.startswith("head.") or model.num_classes == 1000}
        fitted = checkpoint_filter_fn(dict(kept), model)
        model.load_state_dict(fitted, strict=False)

    monkeypatch.setattr("timm.models._builder.load_pretrained", load)
    return weights


def test_a_pretrained_stage_starts_as_the_pretrained_model(offline_pretrained):
    model = Cascade.from_timm(
        "deit_tiny_patch16_224", (7, 14), 1000, pretrained=True, backbone_args={"depth": 2}
    ).eval()
    images = torch.randn(1, 3, 224, 224)
    with torch.inference_mode():
        exits, plain = model(images), offline_pretrained(images)
    assert torch.allclose(exits[1], plain, atol=1e-4)
    # The coarse stage's patches and positions are resampled from the same weights.
    assert not torch.allclose(exits[0], plain, atol=1e-2)
    assert torch.equal(model.stages[0].vit.blocks[0].attn.qkv.weight, offline_pretrained.blocks[0].attn.qkv.weight)


def test_reuse_refuses_unknown_values():
    with pytest.raises(tw.TokensworthError, match="feature='all' is not one of"):
        Reuse(feature="all")  # type: ignore[arg-type]
