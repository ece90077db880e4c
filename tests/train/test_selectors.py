"""Fitting ToSA's selectors to a frozen model."""

import warnings

import pytest
import timm
import torch

from small import randomize
from tokensworth.errors import DataError, TrainingError, UnsupportedModelError
from tokensworth.tokens import ToSA, adapt, restore
from tokensworth.tokens.overlap import overlap_report
from tokensworth.train.selectors import SelectorRecipe, fit_selectors

BATCHES = list(torch.randn(6, 8, 3, 64, 64, generator=torch.Generator().manual_seed(1)))
HELD = list(torch.randn(1, 16, 3, 64, 64, generator=torch.Generator().manual_seed(2)))


def model_to_fit(**options):
    torch.manual_seed(0)
    model = timm.create_model("test_vit2", depth=5, num_classes=7, img_size=64, embed_dim=48, num_heads=3)
    return adapt(randomize(model, 0.1), ToSA(layers=(2, 4), keep=0.5, **options))


def test_fitting_lowers_the_divergence_and_touches_nothing_else():
    model = model_to_fit()
    before = {k: v.clone() for k, v in model.state_dict().items() if "token_method" not in k}
    fit = fit_selectors(model, BATCHES, held_out=HELD, recipe=SelectorRecipe(epochs=6))
    assert fit.on_held_out
    for layer in fit.report:
        assert layer.kl < 0.9 * layer.kl_current
    assert [r.name for r in fit.report] == ["2", "4"]
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in before.items())
    assert not any(p.requires_grad for n, p in model.named_parameters() if "token_method" in n)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(BATCHES[0])


def test_the_overlap_of_the_truth_and_of_chance():
    model = model_to_fit(rows=0)
    unfitted = overlap_report(model, HELD, keep=0.5)
    for layer in unfitted:
        assert layer.sampled == layer.all_rows
        # Unfitted, the selector predicts the current layer's own map.
        assert layer.all_rows.mean == pytest.approx(layer.current.mean, abs=1e-3)
        assert layer.kl == pytest.approx(layer.kl_current, abs=1e-4)
        assert layer.random.mean == pytest.approx(0.5, abs=0.1)
        assert len(layer.current.per_head) == 3
    for layer in overlap_report(model, HELD, keep=1.0):
        assert (layer.sampled.mean, layer.random.layer) == (1.0, 1.0)


def test_a_stopped_fit_goes_on_to_the_same_weights(tmp_path):
    recipe = SelectorRecipe(epochs=3)
    whole = model_to_fit()
    fit_selectors(whole, BATCHES, held_out=HELD, recipe=recipe)

    class StopError(Exception):
        pass

    def stop(progress):
        if progress.step == 9:
            raise StopError

    broken = model_to_fit()
    with pytest.raises(StopError):
        fit_selectors(broken, BATCHES, held_out=HELD, recipe=recipe, out=tmp_path, save_every=4, on_step=stop)
    again = model_to_fit()
    fit = fit_selectors(again, BATCHES, held_out=HELD, recipe=recipe, out=tmp_path, save_every=4)
    for key, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key
    assert [e["epoch"] for e in fit.history] == [1, 2, 3]
    with pytest.raises(TrainingError, match="lr"):
        fit_selectors(model_to_fit(), BATCHES, recipe=SelectorRecipe(epochs=3, lr=1e-3), out=tmp_path)


def test_it_stops_when_nothing_is_gained():
    recipe = SelectorRecipe(epochs=50, lr=1e-9, patience=2)
    fit = fit_selectors(model_to_fit(), BATCHES[:1], held_out=HELD, recipe=recipe)
    assert len(fit.history) == 3


def test_bad_input_is_refused():
    with pytest.raises(DataError, match="generator"):
        fit_selectors(model_to_fit(), (b for b in BATCHES))
    with pytest.raises(UnsupportedModelError, match="adapt"):
        fit_selectors(restore(model_to_fit()), BATCHES)
    with pytest.raises(TrainingError):
        SelectorRecipe(rows=0)
