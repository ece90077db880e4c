"""Token methods in training: their penalties pull the share of tokens where it is wanted."""

import pytest
import timm
import torch

from tokensworth.tokens import adapt, method_from_dict
from tokensworth.tokens.method import adapted_vits, method_penalties
from tokensworth.train.loop import Recipe, _parameter_groups


def _model(name: str, **options):
    torch.manual_seed(0)
    model = timm.create_model("test_vit2", depth=4, num_classes=3, img_size=64)
    return adapt(model, method_from_dict({"name": name, "layers": (2, 3), **options})).train()


@pytest.mark.parametrize("name", ["svit", "dynamicvit"])
def test_the_penalty_pulls_the_share_to_the_wanted_one(name):
    model = _model(name, keep=0.4)
    added = adapted_vits(model)[0][1]
    x = torch.randn(8, 3, 64, 64)
    optimizer = torch.optim.AdamW(added.parameters(), lr=1e-2)
    assert method_penalties(model) == []
    penalties = []
    for _ in range(40):
        model(x)
        (penalty,) = method_penalties(model)
        optimizer.zero_grad()
        penalty.backward()
        optimizer.step()
        penalties.append(penalty.item())
    assert method_penalties(model) == []  # of one pass, asked for once
    assert sum(penalties[-5:]) < 0.2 * sum(penalties[:5])


def test_penalties_by_hand():
    model = _model("svit", keep=0.25, ratio_weight=3.0, bias=200.0)
    model(torch.randn(2, 3, 64, 64))
    assert method_penalties(model)[0].item() == pytest.approx(3.0 * 0.75**2)
    model = _model("dynamicvit", keep=0.5, ratio_weight=2.0)
    for predictor in adapted_vits(model)[0][1].predictors.values():
        predictor.out_conv[-1].bias.data[:] = torch.tensor([200.0, -200.0])
    model(torch.randn(2, 3, 64, 64))
    assert method_penalties(model)[0].item() == pytest.approx(2.0 * (0.5**2 + 0.75**2) / 2)


def test_hidden_tokens_do_not_reach_the_answer_in_training():
    model = _model("dynamicvit", keep=0.5)
    added = adapted_vits(model)[0][1]
    added.predictors["2"].out_conv[-1].bias.data[:] = torch.tensor([-200.0, 200.0])  # every patch goes
    x = torch.randn(2, 3, 64, 64)
    seen = []
    model.blocks[0].register_forward_hook(lambda _, __, out: seen.append(out) or out)
    torch.manual_seed(0)
    before = model(x)
    with torch.no_grad():
        # Disturbing a patch after layer 1 changes nothing for the class token.
        model.blocks[0].register_forward_hook(
            lambda _, __, out: out + torch.nn.functional.pad(torch.ones(2, 3, 64), (0, 0, 1, out.shape[1] - 4))
        )
        torch.manual_seed(0)
        torch.testing.assert_close(model(x), before)


def test_what_a_method_adds_has_its_own_learning_rate():
    model = _model("svit")
    groups = _parameter_groups(model, Recipe())
    (added,) = [g for g in groups if g.get("lr_scale") == 10.0]
    assert {id(p) for p in added["params"]} == {id(p) for p in model.token_method.parameters()}
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))
