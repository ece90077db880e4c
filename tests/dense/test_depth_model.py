"""Depth models: any size, any decoder, adapted backbones, files."""

import pytest
import timm
import torch

import tokensworth as tw
from tokensworth.dense import DepthConfig, DepthModel, SILogLoss
from tokensworth.errors import CheckpointError, UnsupportedModelError
from tokensworth.jobs.models import open_model, save_model
from tokensworth.measure.describe import describe
from tokensworth.tokens.grids import tokens_after

pytestmark = pytest.mark.filterwarnings("ignore:.*not fitted.*")
SMALL = {"depth": 4, "embed_dim": 48, "num_heads": 3, "num_classes": 0, "dynamic_img_size": True}
KEEPING = {
    "tosa": tw.ToSA(layers=(2, 4), keep=0.6),
    "tosa per head": tw.ToSA(layers=(2, 4), keep=0.6, scope="per_head"),
    "svit": tw.SViT(layers=(2, 4), bias=0.0),
    "tome": tw.ToMe(r=4, unmerge=True),
}


def make(decoder="newcrfs", name="vit_tiny_patch16_224", size=(64, 64), **options):
    torch.manual_seed(0)
    encoder = timm.create_model(name, **{**SMALL, "img_size": size, **options})
    return DepthModel(encoder, DepthConfig(decoder, (32, 32, 32, 32), image_size=size)).eval()


@pytest.mark.parametrize("decoder", ["newcrfs", "dpt", "linear"])
@pytest.mark.parametrize("shape", [(1, 97, 131), (2, 64, 64), (8, 15, 40), (1, 240, 96)])
@torch.inference_mode()
def test_any_size(decoder, shape):
    count, height, width = shape
    depth = make(decoder)(torch.randn(count, 3, height, width))
    assert depth.shape == (count, 1, height, width)
    assert 0 < depth.min() <= depth.max() < 10


@torch.inference_mode()
def test_a_large_image_under_every_method():
    image = torch.randn(1, 3, 1024, 768)
    for method in KEEPING.values():
        model = tw.adapt(make("linear"), method)
        assert model(image).shape == (1, 1, 1024, 768)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_base_patch16_siglip_224", {}),  # no class token
        ("vit_small_patch14_reg4_dinov2", {}),
        ("vit_small_patch16_dinov3", {}),  # Eva: rotary positions
    ],
)
@torch.inference_mode()
def test_other_encoders(name, options):
    image = torch.randn(2, 3, 70, 90)
    for decoder in ("newcrfs", "dpt"):
        model = make(decoder, name, (56, 56) if "14" in name else (64, 64), **options)
        assert model(image).shape == (2, 1, 70, 90)
    for method in KEEPING.values():
        assert tw.adapt(model, method)(image).shape == (2, 1, 70, 90)
        tw.restore(model)


@pytest.mark.parametrize("decoder", ["newcrfs", "dpt"])
@pytest.mark.parametrize("method", KEEPING.values(), ids=KEEPING)
@torch.inference_mode()
def test_methods_that_keep_the_grid(decoder, method):
    model = make(decoder)
    images = torch.randn(3, 3, 80, 64)
    plain = model(images)
    tw.adapt(model, method)
    thin = model(images)
    assert not torch.allclose(thin, plain, atol=1e-6)
    assert torch.allclose(model(images[[2, 0, 1]]), thin[[2, 0, 1]], atol=1e-5)
    if method in (KEEPING["tosa"], KEEPING["tome"]):  # the others' own work is more than so small a model saves
        assert describe(model).macs < describe(model).dense_macs
    assert torch.equal(tw.restore(model)(images), plain)


@torch.inference_mode()
def test_a_full_keep_is_the_plain_model():
    images = torch.randn(2, 3, 64, 80)
    for decoder in ("newcrfs", "dpt"):
        model = make(decoder)
        plain = model(images)
        for method in (tw.ToSA(layers=(2, 4), keep=1), tw.ToMe(r=0, unmerge=True)):
            assert torch.allclose(tw.adapt(model, method)(images), plain, atol=1e-4)
            tw.restore(model)


@pytest.mark.parametrize("method", [tw.EViT(keep=0.7, layers=(2,)), tw.ToMe(r=4), tw.Random(keep=0.5, layers=(2,))])
def test_methods_that_lose_tokens_are_refused(method):
    model = make()
    with pytest.raises(UnsupportedModelError, match="needs every token"):
        tw.adapt(model, method)
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 1, 64, 64)


def test_unmerged_tokens_of_an_inner_layer():
    """What a decoder reads of layer 2 is what layer 2 gave, at the places that were merged too."""
    encoder = tw.adapt(make().encoder, tw.ToMe(r=4, unmerge=True))
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        inner, last = tokens_after(encoder, images, (2, 4))
        assert inner.shape == last.shape == (2, 17, 48)
        assert torch.equal(last, encoder.forward_features(images))
    merged = [len(torch.unique(tokens[0], dim=0)) for tokens in (inner, last)]
    assert merged == [17 - 8, 17 - 8 - 4 - (min(4, (5 - 1) // 2))]


@pytest.mark.parametrize("decoder", ["newcrfs", "dpt", "linear"])
@pytest.mark.parametrize("method", [None, *KEEPING.values()], ids=["plain", *KEEPING])
def test_training_moves_every_part(decoder, method):
    model = make(decoder).train()
    if method is not None:
        tw.adapt(model, method)
    loss = SILogLoss()(model(torch.randn(2, 3, 64, 64)), torch.rand(2, 1, 64, 64) * 5 + 0.5)
    sum(tw.method_penalties(model), loss).backward()
    still = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None and "token_method" not in n]
    assert not still


def test_a_model_comes_back_from_its_folder(tmp_path):
    images = torch.randn(2, 3, 61, 75)
    for method in (None, *KEEPING.values()):
        model = make()
        if method is not None:
            tw.adapt(model, method)
        save_model(model, tmp_path / "model")
        back = open_model(str(tmp_path / "model"), "cpu")
        assert isinstance(back, DepthModel)
        with torch.inference_mode():
            assert torch.equal(back(images), model(images))
    plain = timm.create_model(f"local-dir:{tmp_path / 'model' / 'encoder'}", pretrained=True)
    assert type(plain).__name__ == "VisionTransformer"
    (tmp_path / "model" / "decoder.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError):
        open_model(str(tmp_path / "model"), "cpu")


def test_encoders_by_name_and_folder(tmp_path):
    tokens = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=5)
    from tokensworth.tokens.storage import save_pretrained

    save_pretrained(tokens, tmp_path, model_args={"depth": 2, "num_classes": 5})
    model = DepthModel.from_timm(str(tmp_path), DepthConfig(widths=(32,) * 4, image_size=(96, 128)))
    assert torch.equal(model.encoder.blocks[1].mlp.fc1.weight, tokens.blocks[1].mlp.fc1.weight)
    assert model(torch.randn(1, 3, 96, 128)).shape == (1, 1, 96, 128)
    for wrong in ("resnet18", "no_such_model"):
        with pytest.raises(UnsupportedModelError):
            DepthModel.from_timm(wrong, DepthConfig(), pretrained=False)
    with pytest.raises(UnsupportedModelError, match="dynamic_img_size"):
        DepthModel(tokens, DepthConfig())
    with pytest.raises(UnsupportedModelError, match="no decoder"):
        make("unet")
