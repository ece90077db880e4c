"""A cascade of shared weights: untrained it is the pretrained model at every grid, and its weights are there once."""

import copy

import pytest
import torch
from timm.utils.model_ema import ModelEmaV3

from small import randomize
from timm_models import NAMES, make
from tokensworth.cascade import Cascade, Reuse
from tokensworth.errors import TokensworthError, UnsupportedModelError
from tokensworth.measure.macs import model_macs, stage_macs
from tokensworth.tokens import ToMe, adapt

# Of each kind one in `make test`; the others in `make test-full`.
QUICK = {
    "deit_tiny_distilled_patch16_224",
    "vit_tiny_r_s16_p8_224",
    "vit_base_patch16_rpn_224",
    "vit_small_patch14_reg4_dinov2",
    "vit_small_patch16_dinov3",
    "vit_base_patch32_clip_224",
    "vit_base_patch16_siglip_224",
    "eva02_tiny_patch14_336",
    "vit_small_patch16_rope_mixed_224",
    "vit_wee_patch16_reg1_gap_256",
    "test_vit2",
}
FULL = Reuse(joint_norm=False, hidden=8)


def shared(name="test_vit2", grids=(2, 3, 5), reuse=FULL, **options) -> Cascade:
    return Cascade.from_timm(make(name, 2), grids, share=True, reuse=reuse, **options)


def images(model: Cascade, count: int = 2) -> torch.Tensor:
    size = model.config.image_size
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in NAMES])
@torch.no_grad()
def test_untrained_every_stage_is_the_pretrained_model_bit_for_bit(name):
    model = make(name, 2)
    cascade = Cascade.from_timm(model, (2, 3), share=True, reuse=FULL)
    seen = images(cascade)
    for stage, logits in zip(cascade.stages, cascade(seen), strict=True):
        plain = copy.deepcopy(model)
        plain.set_input_size(img_size=stage.size)
        assert torch.equal(plain(stage.resize(seen)), logits)


def test_gradients_reach_the_shared_weights_and_whatever_a_stage_reuses():
    cascade = shared().train()
    cascade(images(cascade))[2].sum().backward()
    assert all(p.grad is not None for p in cascade.stages[0].vit.blocks.parameters())
    assert cascade.stages[2].feature.layers[0].fc2.weight.grad.abs().max() > 0
    assert cascade.stages[2].relation.fc2.weight.grad.abs().max() > 0


def unique_bytes(model: torch.nn.Module) -> int:
    return sum({p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}.values())


def test_weights_are_held_and_saved_once(tmp_path):
    model = make("vit_small_patch16_224", 4)
    cascade = Cascade.from_timm(model, (4, 7, 10, 14), share=True, reuse=Reuse("off", relation="off"))
    cascade.save_pretrained(tmp_path)
    backbone = unique_bytes(model)
    heads = 3 * 4 * sum(p.numel() for part in (model.norm, model.head) for p in part.parameters())
    header = 20_000
    assert (tmp_path / "model.safetensors").stat().st_size <= backbone + heads + header
    assert unique_bytes(cascade) == backbone + heads
    reusing = Cascade.from_timm(model, (4, 7, 10, 14), share=True, reuse=FULL)
    assert unique_bytes(reusing) < 1.2 * backbone


@torch.no_grad()
def test_saved_and_loaded_it_answers_the_same(tmp_path):
    cascade = randomize(shared(reuse=Reuse(joint_norm=False, hidden=8, layers=1)), 0.1)
    cascade.save_pretrained(tmp_path)
    loaded = Cascade.from_pretrained(tmp_path)
    assert loaded.config == cascade.config
    for one, other in zip(cascade(images(cascade)), loaded(images(cascade)), strict=True):
        assert torch.equal(one, other)


@torch.no_grad()
def test_copies_share_among_themselves_and_not_with_the_original():
    cascade = shared()
    copied = copy.deepcopy(cascade)
    assert copied.stages[2].vit.blocks is copied.stages[0].vit.blocks
    assert copied.stages[2].vit.blocks is not cascade.stages[0].vit.blocks
    average = ModelEmaV3(cascade, decay=0.5)
    before = cascade.stages[0].vit.blocks[0].mlp.fc1.weight.clone()
    cascade.stages[2].vit.blocks[0].mlp.fc1.weight.add_(1)
    average.update(cascade)
    found = average.module.stages[1].vit.blocks[0].mlp.fc1.weight
    torch.testing.assert_close(found, before + 0.5)


def test_position_embeddings_kept_for_inference_follow_the_weights():
    cascade = shared()
    seen = images(cascade)
    with torch.no_grad():
        before = cascade(seen)[1]
        learned = cascade.stages[0].vit._parameters["pos_embed"]
        learned.add_(torch.randn_like(learned))
        after = cascade(seen)[1]
    assert (after - before).abs().max() > 1e-3
    cascade.train()
    trained = cascade(seen)[1]
    torch.testing.assert_close(trained.detach(), after, atol=1e-5, rtol=1e-4)
    trained.sum().backward()
    assert cascade.stages[0].vit._parameters["pos_embed"].grad.abs().max() > 0


def test_its_cost_is_that_of_the_grids_and_of_what_is_reused():
    plain = shared(reuse=Reuse("off", relation="off", joint_norm=False))
    whole = model_macs(make("test_vit2", 2), 160)
    assert plain.config.image_size == 5 * 16
    costs = stage_macs(plain)
    assert [c.total for c in costs] == [c.plain for c in costs]
    assert costs[-1].total < whole
    reusing = stage_macs(shared())
    assert reusing[0].total >= costs[0].total
    assert all(a.feature > 0 and a.relation > 0 for a in reusing[1:])


def test_without_reuse_nothing_is_handed_on():
    cascade = shared(reuse=Reuse("off", relation="off", joint_norm=False))
    _, state = cascade.run_stage(0, images(cascade), None)
    assert state.features.numel() == 0
    assert state.relations is None


def test_reuse_in_the_last_layers_alone_runs_the_others_plainly():
    cascade = randomize(shared(reuse=Reuse(joint_norm=False, hidden=8, layers=1)), 0.1)
    assert len(cascade.stages[1].feature.layers) == 1
    with torch.no_grad():
        _, state = cascade.run_stage(0, images(cascade), None)
    assert state.relations.shape[1] == cascade.stages[0].heads


def test_a_head_of_other_classes_starts_anew_and_cosines_stay_within_their_scale():
    cascade = shared(num_classes=7, head="cosine")
    with torch.no_grad():
        for logits in cascade(images(cascade)):
            assert logits.shape == (2, 7)
            assert logits.abs().max() <= 100.001


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Cascade.from_timm(make("test_vit", 1), (2, 3), 5), "separate weights"),
        (lambda: Cascade.from_timm("test_vit", (2, 3)), "number of classes"),
        (lambda: shared(reuse=Reuse()), "joint_norm"),
        (lambda: shared(reuse=Reuse(joint_norm=False, layers=9)), "last 9 layers of 2"),
        (lambda: shared(stem="conv"), "patch embedding"),
        (lambda: Cascade.from_timm("resnet18", (2, 3), share=True), "VisionTransformer"),
        (lambda: Cascade.from_timm("vit_nowhere", (2, 3), share=True), "timm cannot make it"),
        (lambda: Cascade.from_timm(torch.nn.Linear(2, 2), (2, 3), share=True), "Linear"),
    ],
)
def test_what_cannot_be_shared_is_said_in_one_line(call, message):
    with pytest.raises(TokensworthError, match=message) as found:
        call()
    assert "\n" not in str(found.value)


def test_token_methods_are_refused():
    with pytest.raises(UnsupportedModelError, match="share their weights"):
        adapt(shared(), ToMe(r=2))
