"""`adapt`, `fit`, `show` and fine-tuning, from a saved model to a page."""

import numpy as np
import pytest
import timm
from PIL import Image

import tokensworth as tw
from commands import run_command
from small import small_cascade
from tokensworth.errors import TokensworthError
from tokensworth.jobs.models import open_model
from tokensworth.tokens import method_of
from tokensworth.tokens.storage import save_pretrained

pytestmark = pytest.mark.filterwarnings("ignore:.*not fitted.*")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A saved timm model, a saved cascade, and a labelled folder."""
    root = tmp_path_factory.mktemp("tokens")
    small_cascade().save_pretrained(root / "cascade")
    model = timm.create_model("test_vit2", depth=4, num_classes=4, img_size=64)
    save_pretrained(model, root / "vit")
    random = np.random.default_rng(0)
    for label in range(4):
        (root / "set" / f"class{label}").mkdir(parents=True)
        for i in range(8):
            array = random.integers(0, 256, (70, 66, 3), dtype=np.uint8)
            Image.fromarray(array).save(root / "set" / f"class{label}" / f"{i}.png")
    return root


@pytest.mark.parametrize(("kind", "layers"), [("vit", "2,4"), ("cascade", "2")])
def test_adapt_fit_and_show(place, kind, layers):
    adapted, fitted = place / f"{kind}-tosa", place / f"{kind}-fitted"
    options = ("--set", f"layers={layers}", "--set", "keep=0.5")
    cost = run_command("adapt", "--model", place / kind, *options, "--out", adapted, "--json")
    assert cost["macs"] < cost["dense_macs"]
    assert all(layer["kept"] < layer["tokens"] for layer in cost["layers"])
    words = ("--model", adapted, "--data", place / "set", "--held-out", 8, "--batch-size", 8, "--epochs", 2)
    fit = run_command("fit", *words, "--out", fitted, "--json")
    assert (fit["images"], fit["held_out"], len(fit["history"])) == (24, 8, 2)
    again = run_command("fit", *words, "--out", fitted)
    assert "mean" in again["text"]
    assert method_of(open_model(str(fitted))) == method_of(open_model(str(adapted)))
    photo = next((place / "set").rglob("*.png"))
    shown = run_command("show", photo, "--model", fitted, "--out", place / "page.html", "--json")
    assert len(shown["layers"]) == len(cost["layers"])
    for layer, expected in zip(shown["layers"], cost["layers"], strict=True):
        assert sum(layer["kept"]) <= expected["kept"]
        assert len(layer["kept"]) == layer["grid"][0] * layer["grid"][1]
    page = (place / "page.html").read_text()
    assert page.count("data:image/png;base64,") == 1 + len(shown["layers"])
    assert "http" not in page


def test_fine_tuning_keeps_the_selectors_and_learns_from_the_dense_model(place):
    adapted, tuned = place / "start", place / "tuned"
    model = tw.adapt(small_cascade(), tw.ToSA(layers=(2,), keep=0.5))
    selector = model.stages[0].vit.token_method.layers["2"].selector
    selector.first.data += 0.1
    model.save_pretrained(adapted)
    record = run_command(
        "train", "--data", place / "set", "--start", adapted, "--teacher", place / "cascade", "--classes", 4,
        "--epochs", 1, "--batch-size", 8, "--lr", 1e-2, "--out", tuned, "--json",
    )  # fmt: skip
    assert len(record["history"]) == 1
    after = tw.Cascade.from_pretrained(tuned)
    kept = after.stages[0].vit.token_method.layers["2"].selector
    assert (kept.first - selector.first).abs().max() < 1e-3
    before = model.stages[0].vit.blocks[0].mlp.fc1.weight
    assert (after.stages[0].vit.blocks[0].mlp.fc1.weight - before).abs().max() > 1e-3


def test_an_adapted_cascade_goes_through_every_command(place):
    folder = place / "through"
    tw.adapt(small_cascade(), tw.ToSA(layers=(2,), keep=0.5)).save_pretrained(folder)
    known, policy = place / "cal.safetensors", place / "policy.json"
    data = ("--data", place / "set", "--json")
    run_command("calibrate", "--model", folder, *data, "--out", known)
    run_command("solve", "--calibration", known, "--target", 0.2, "--out", policy, "--json")
    assert run_command("eval", "--model", folder, *data, "--policy", policy)["points"]
    bench = run_command("bench", "--model", folder, *data, "--policy", policy, "--images", 8, "--repeats", 1)
    assert all(stage["saved"] != 0 for stage in bench["stages"])
    page = place / "report.html"
    run_command("report", "--model", folder, *data, "--calibration", known, "--out", page, "--timed", 2, "--repeats", 1)
    assert "Tokens that take part" in page.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--set", "keep=2"), "keep"),
        (("--set", "keep"), "name=value"),
        (("--set", "speed=2"), "options do not fit tosa"),
        (("--set", "layers=9,11"), "layer"),
        (("--method", "other"), "no token method 'other'"),
    ],
)
def test_bad_options_are_named(place, words, message):
    out = place / "never"
    with pytest.raises(TokensworthError, match=message):
        run_command("adapt", "--model", place / "vit", "--out", out, *words)
    assert not out.exists()
