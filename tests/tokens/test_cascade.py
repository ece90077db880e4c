"""ToSA inside a cascade: the same runner, solver, counting and saving."""

import pytest
import torch

from small import randomize, small_config
from tokensworth.cascade import Cascade, CascadeConfig, Reuse, model_hash
from tokensworth.exits import calibrate, frontier
from tokensworth.measure.macs import stage_macs
from tokensworth.tokens import ToSA, adapt, dense, method_of, restore, set_keep

pytestmark = pytest.mark.filterwarnings("ignore:.*not fitted.*")
SCOPES = ("layer", "per_head")


def adapted(scope="layer", keep=0.5, **reuse) -> Cascade:
    torch.manual_seed(0)
    options = Reuse(hidden=16, width=8, **reuse)
    config = CascadeConfig(
        "vit",
        (4, 8),
        4,
        image_size=32,
        stem="conv",
        reuse=options,
        backbone_args={"embed_dim": 32, "depth": 4, "num_heads": 2, "mlp_ratio": 2.0},
    )
    model = randomize(Cascade(config), 0.2)
    return adapt(model, ToSA(layers=(2, 4), keep=keep, scope=scope)).eval()


IMAGES = torch.randn(24, 3, 32, 32, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("weighting", [False, True])
@torch.no_grad()
def test_keep_everything_is_the_plain_cascade_but_for_what_is_handed_on(scope, weighting):
    """Without relation reuse exactly; with it a ToSA layer hands on a prediction instead of the truth."""
    free = adapted(scope, 1.0, relation="off")
    kept = free(IMAGES)
    with dense(free):
        for one, other in zip(kept, free(IMAGES), strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    model = adapted(scope, 1.0, weighting=weighting)
    kept = model(IMAGES)
    with dense(model):
        plain = model(IMAGES)
    torch.testing.assert_close(kept[0], plain[0], atol=1e-5, rtol=1e-5)
    assert (kept[1] - plain[1]).abs().max() > 1e-4


@torch.no_grad()
def test_a_tosa_layer_hands_on_its_predicted_map():
    model = adapted(keep=0.5)
    _, state = model.run_stage(0, IMAGES, None)
    maps = state.relations.unflatten(1, (4, 2))
    torch.testing.assert_close(maps[:, 1].exp().sum(-1), torch.ones_like(maps[:, 1, :, :, 0]))
    assert (maps[:, 0].exp().sum(-1) - 1).abs().max() > 0.1
    # Unfitted, the prediction is the standard layer's own map.
    torch.testing.assert_close(maps[:, 1], maps[:, 0].log_softmax(-1), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_relation_bias_is_gathered_to_the_chosen_tokens():
    """Tokens that are left out cannot be seen: making their logits huge changes nothing."""
    model = adapted(keep=0.4)
    stage = model.stages[1]
    block = stage.vit.blocks[1]
    x = torch.randn(3, 65, 32)
    bias = torch.randn(3, 2, 65, 65)
    stage.vit.token_method.layers["2"].observe(block.attn, *torch.randn(2, 3, 2, 65, 16), None)
    picked = stage.vit.token_method.layers["2"].picked
    out = stage._block(block, 1, x, bias, torch.zeros(3, 65, 8), None)
    stage.vit.token_method.layers["2"].picked = picked
    loud = bias.masked_fill(~picked.chosen.mask(65)[:, None, None], 1e4)
    torch.testing.assert_close(stage._block(block, 1, x, loud, torch.zeros(3, 65, 8), None), out)


def test_its_frontier_counts_what_the_stages_cost():
    """That the runner follows it is shown in tests/run."""
    model = adapted()
    labels = torch.randint(0, 4, (24,), generator=torch.Generator().manual_seed(0))
    known = calibrate(model, [(IMAGES, labels)])
    costs = [s.total for s in stage_macs(model)]
    assert known.exit_costs.tolist() == [costs[0], sum(costs)]
    assert len(frontier(known).policies) > 1


@torch.no_grad()
def test_saving_keeps_the_method_and_counting_shows_what_it_saves(tmp_path):
    model = adapted(keep=0.3)
    model.save_pretrained(tmp_path)
    again = Cascade.from_pretrained(tmp_path)
    assert method_of(again) == method_of(model)
    for one, other in zip(again(IMAGES), model(IMAGES), strict=True):
        assert torch.equal(one, other)
    first = model_hash(model)
    assert model_hash(again) == first
    stages = stage_macs(model)
    for s in stages:
        assert s.plain + s.feature + s.relation + s.wider - s.saved == s.total
    set_keep(model, 0.9)
    assert model_hash(model) != first
    assert [a.saved > b.saved for a, b in zip(stages, stage_macs(model), strict=True)] == [True, True]
    assert restore(model).config.tokens is None


def test_gradients_reach_every_stage():
    model = adapted().train()
    sum(out.square().sum() for out in model(IMAGES)).backward()
    missing = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    # Logits of a ToSA layer are not handed on, but all of its weights still work.
    assert missing == []
    assert small_config().tokens is None
