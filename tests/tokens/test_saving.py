"""Adapted timm models on disk."""

import json

import pytest
import timm
import torch

from tokensworth.errors import CheckpointError, UnsupportedModelError
from tokensworth.tokens import ToSA, adapt, method_of, restore
from tokensworth.tokens.storage import from_pretrained, save_pretrained

pytestmark = pytest.mark.filterwarnings("ignore:.*not fitted.*")


def model_and_images():
    torch.manual_seed(0)
    model = timm.create_model("vit_wee_patch16_reg1_gap_256", depth=5, num_classes=7, img_size=96).eval()
    return model, torch.randn(2, 3, 96, 96)


@torch.no_grad()
def test_an_adapted_model_comes_back(tmp_path):
    model, x = model_and_images()
    adapt(model, ToSA(layers=(2, 4), keep=(0.4, 0.7), scope="per_head"))
    model.token_method.layers["2"].selector.first.add_(0.1)
    save_pretrained(model, tmp_path)
    again = from_pretrained(tmp_path)
    assert method_of(again) == method_of(model)
    assert torch.equal(again(x), model(x))
    # The same folder is a plain timm model to anybody else.
    plain = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert torch.equal(plain(x), restore(model)(x))
    save_pretrained(model, tmp_path)
    assert method_of(from_pretrained(tmp_path)) is None


def test_what_cannot_be_loaded_is_named(tmp_path):
    model, _ = model_and_images()
    adapt(model, ToSA(layers=(2,)))
    with pytest.raises(CheckpointError, match="neither a folder nor on the Hub"):
        from_pretrained(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        from_pretrained(tmp_path)
    save_pretrained(model, tmp_path)
    method = json.loads((tmp_path / "tokens.json").read_text())
    (tmp_path / "tokens.json").write_text(json.dumps(method | {"name": "future"}))
    with pytest.raises(UnsupportedModelError, match="future"):
        from_pretrained(tmp_path)
    (tmp_path / "tokens.json").write_text(json.dumps(method | {"width": 8}))
    with pytest.raises(CheckpointError, match="shapes"):
        from_pretrained(tmp_path)
    (tmp_path / "tokens.json").write_text(json.dumps(method))
    (tmp_path / "tokens.safetensors").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match=r"tokens\.safetensors"):
        from_pretrained(tmp_path)


def test_a_model_that_timm_did_not_make_is_refused(tmp_path):
    from timm.models.vision_transformer import VisionTransformer

    bare = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2)
    with pytest.raises(UnsupportedModelError, match="create_model"):
        save_pretrained(bare, tmp_path)
