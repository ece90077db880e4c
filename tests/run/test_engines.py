"""Every engine gives PyTorch's answers: same label and exit, probabilities within 1e-4."""

import numpy as np
import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st

import tokensworth as tw
from small import randomize, small_cascade
from tokensworth.cascade.resize import ImageResize, MatrixImageResize, RowResize, SeparableResize
from tokensworth.data.packaged import packaged_folder, packaged_images
from tokensworth.run.engines.graphs import stage_files
from tokensworth.run.engines.padding import padded_size, run_padded

pytestmark = pytest.mark.filterwarnings("ignore:.*not fitted.*")
ENGINES = ("onnx", "openvino", pytest.param("compile", marks=pytest.mark.slow))


def made(kind: str) -> tw.Cascade:
    torch.manual_seed(1)
    if kind == "shared":
        reuse = tw.Reuse(joint_norm=False, hidden=8)
        backbone = timm.create_model("test_vit2", num_classes=4)
        return randomize(tw.Cascade.from_timm(backbone, (2, 3, 4), share=True, reuse=reuse, image_size=32), 0.1)
    if kind == "rotary":
        backbone = timm.create_model(
            "vit_small_patch16_rope_mixed_224", depth=2, num_classes=4, embed_dim=48, num_heads=2
        )
        reuse = tw.Reuse("off", relation="off", joint_norm=False)
        return tw.Cascade.from_timm(backbone, (1, 2), share=True, reuse=reuse, image_size=32).eval()
    if kind == "each, matching, naive":
        return small_cascade(reuse=tw.Reuse("each", True, "matching", "naive", weighting=True, hidden=8, width=8))
    model = small_cascade()
    if kind == "ToSA":
        tw.adapt(model, tw.ToSA(layers=(2,), keep=0.5))
    return model


KINDS = ("separate", "shared", "rotary", "each, matching, naive", "ToSA")


@pytest.fixture(scope="module", params=KINDS)
def setting(request, tmp_path_factory):
    """A cascade, images, a policy, PyTorch's answers, and the stages as ONNX files."""
    pytest.importorskip("onnxscript")
    model = made(request.param)
    images = torch.randn(40, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    known = tw.calibrate(model, [(images, torch.zeros(40, dtype=torch.long))])
    policy = tw.Policy([float(np.median(scores)) for scores in known.scores[:-1]])
    return model, images, known, policy, stage_files(model, tmp_path_factory.mktemp("graphs"))


@pytest.mark.parametrize("engine", ENGINES)
def test_same_answers_as_pytorch(engine, setting):
    model, images, known, policy, files = setting
    plain = list(tw.Runner(model, policy, batch_size=16).predict(images))
    runner = tw.Runner(model, policy, batch_size=16, backend=engine, graphs=None if engine == "compile" else files)
    gaps = np.abs(known.scores[:-1] - np.array(policy.thresholds)[:, None]).min(axis=0)
    for one, other, gap in zip(plain, runner.predict(images), gaps, strict=True):
        if gap > 1e-5:
            assert (one.label, one.exit) == (other.label, other.exit)
            assert one.confidence == pytest.approx(other.confidence, abs=1e-4)
    labels, _, exits = runner.run(images[:1])
    assert (int(labels[0]), int(exits[0]) + 1) == (plain[0].label, plain[0].exit)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["onnx", "openvino"])
def test_the_packaged_cascade_on_the_packaged_images(engine):
    pytest.importorskip(engine + ("runtime" if engine == "onnx" else ""))
    model, images = tw.Cascade.from_pretrained(packaged_folder()), packaged_images("test")
    images = images.select(np.arange(400))
    policy = tw.Policy((0.8, 0.8))
    plain = list(tw.Runner(model, policy).predict(images))
    other = list(tw.Runner(model, policy, backend=engine).predict(images))
    same = np.mean([(a.label, a.exit) == (b.label, b.exit) for a, b in zip(plain, other, strict=True)])
    assert same >= 0.999
    assert max(abs(a.confidence - b.confidence) for a, b in zip(plain, other, strict=True) if a.exit == b.exit) < 1e-4


@given(st.integers(1, 2000))
def test_padding_adds_at_most_a_third_and_meets_few_sizes(count):
    size = padded_size(count)
    assert count <= size
    assert size == count or size - count <= size / 3
    assert bin(size).count("1") <= 2


def test_padded_calls_give_the_rows_that_were_asked_for():
    seen = []
    call = lambda inputs: seen.append(len(inputs[0])) or [2 * inputs[0], inputs[1] + 1]  # noqa: E731
    one, other = torch.randn(5, 3), torch.randn(5, 2, 2)
    found = run_padded(call, [one, other])
    assert seen == [6]
    assert torch.equal(found[0], 2 * one)
    assert torch.equal(found[1], other + 1)


@pytest.mark.parametrize(
    ("coarse", "fine", "prefix", "zeros", "naive"), [(3, 5, 1, 0, False), (7, 10, 0, 1, False), (4, 6, 2, 0, True)]
)
def test_products_resize_as_weighted_sums_do(coarse, fine, prefix, zeros, naive):
    resize = RowResize(coarse, fine, prefix, naive, zeros)
    maps = torch.randn(3, prefix + coarse**2, 6)
    torch.testing.assert_close(SeparableResize(resize)(maps), resize(maps))


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(56, 56), (16, 24)])
def test_products_resize_images_as_interpolation_does(mode, size):
    resize, image = ImageResize(size, mode), torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(MatrixImageResize(resize, 32)(image), resize(image), atol=1e-5, rtol=1e-5)


def test_unknown_engines_and_precisions_are_refused():
    with pytest.raises(tw.PolicyError, match="torch, compile, onnx, openvino"):
        tw.Runner(small_cascade(), backend="tensorflow")
    with pytest.raises(tw.PolicyError, match="ONNX Runtime"):
        tw.Runner(small_cascade(), backend="onnx", dtype=torch.bfloat16)
