"""The relatives of ToSA against their authors' outputs."""

import json
from functools import partial

import numpy as np
import pytest
import timm
import torch
from torch import nn

from golden import DATA, golden_images, golden_weights
from tokensworth.tokens import adapt
from tokensworth.tokens.method import adapted_vits, method_class
from tokensworth.tokens.methods.vtc_lfc import attended, low_frequency_energy

METHOD_NAMES = {"topk": "topk", "evit": "evit", "dyvit": "dynamicvit"}


def cases(name: str) -> dict:
    return json.loads((DATA / f"{name}.json").read_text())


def sequence_lengths(model: nn.Module) -> list[int]:
    """Tokens that enter each block's MLP, filled by a forward pass."""
    lengths: list[int] = []
    for block in model.blocks:
        block.mlp.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    return lengths


@pytest.mark.parametrize("key", cases("tome"))
@torch.no_grad()
def test_tome(key):
    case = cases("tome")[key]
    name, r, proportional = case["case"].split("|")
    value = r.removeprefix("r=")
    if value.startswith("("):
        merged, inflection = value.strip("()").split(",")
    else:
        merged, inflection = value, "0"
    model = golden_weights(timm.create_model(name)).eval()
    options = {"r": int(merged), "inflection": float(inflection), "proportional": proportional.endswith("True")}
    adapt(model, method_class("tome")(**options))
    lengths = sequence_lengths(model)
    out = model(golden_images())
    wanted = torch.from_numpy(np.load(DATA / "tome.npz")[key])
    torch.testing.assert_close(out, wanted, atol=1e-4, rtol=0)
    assert lengths[-1] == (case["final_tokens"] or 197)


@pytest.mark.parametrize("key", cases("token_reduction"))
@torch.no_grad()
def test_token_reduction(key):
    case = cases("token_reduction")[key]
    name, keep = case["case"].split("|keep_rate=")
    model = timm.create_model("deit_tiny_patch16_224").eval()
    adapt(model, method_class(METHOD_NAMES[name])(keep=float(keep)))
    names = {}
    for own in model.state_dict():
        theirs = own
        for index, layer in enumerate((4, 7, 10)):
            theirs = theirs.replace(f"token_method.predictors.{layer}.", f"score_predictor.{index}.")
        names[own] = theirs
    assert set(case["extra_params"]) <= set(names.values())
    golden_weights(model, names)
    lengths = sequence_lengths(model)
    out = model(golden_images())
    torch.testing.assert_close(out, torch.from_numpy(np.load(DATA / "token_reduction.npz")[key]), atol=1e-4, rtol=0)
    assert lengths == case["tokens_into_mlp_per_block"]


@torch.no_grad()
def test_svit():
    case = cases("svit_tiny")
    layers = case["config"]["select_layers_1based"]
    model = timm.create_model("deit_tiny_patch16_224", norm_layer=partial(nn.LayerNorm, eps=1e-5)).eval()
    model.norm.eps = 1e-6
    adapt(model, method_class("svit")(layers=tuple(layers), elect_prefix=True))
    inside = {
        "attn.qkv.": "self_attn.in_proj_",
        "attn.proj.": "self_attn.out_proj.",
        "mlp.fc1.": "linear1.",
        "mlp.fc2.": "linear2.",
        "norm1.": "norm1.",
        "norm2.": "norm2.",
    }
    names = {}
    for own in model.state_dict():
        theirs = own
        if own.startswith("blocks."):
            _, number, rest = own.split(".", 2)
            mine = next(part for part in inside if rest.startswith(part))
            theirs = f"blocks.{number}.TransformerEncoderLayer.{rest.replace(mine, inside[mine])}"
        for index, layer in enumerate(layers):
            gate = f"token_method.gates.{layer}."
            if own.startswith(gate):
                part = own.removeprefix(gate)
                theirs = f"selective_modules.{index}.{'' if part.startswith('norm') else 'mlp.'}{part}"
        names[own] = theirs
    assert set(names.values()) == set(case["shapes"])
    golden_weights(model, names)
    counts = []
    adapted_vits(model)[0][1].record = lambda _, chosen: counts.append(chosen.valid.sum(1).tolist())
    out = model(golden_images())
    golden = np.load(DATA / "svit_tiny.npz")
    torch.testing.assert_close(out, torch.from_numpy(golden[golden.files[0]]), atol=1e-4, rtol=0)
    assert counts == case["kept_tokens_per_selector"]


@pytest.mark.parametrize("case", cases("vtc_lfc_selector")["cases"], ids=lambda c: f"cutoff {c['cutoff']}")
def test_vtc_lfc_selector(case):
    x = torch.from_numpy(np.random.RandomState(1).standard_normal((2, 197, 192)).astype(np.float32))
    drawn = np.random.RandomState(2).standard_normal((2, 3, 197, 197)).astype(np.float32)
    attention = torch.from_numpy(drawn).softmax(dim=-1)
    scores = low_frequency_energy(x[:, 1:], case["cutoff"]) * attended(attention, 1)
    kept = scores.topk(case["n_tokens"], dim=1).indices.sort(dim=1).values
    assert kept.tolist() == case["kept_patch_indices"]
