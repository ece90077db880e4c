"""The inside of timm's attention layers, in three steps: project, attend, finish.

Three classes are known: `Attention` (ViT, DeiT, CLIP, SigLIP, DINOv2), `EvaAttention` (EVA-02, DINOv3) and
`AttentionRope`. B images, H heads, N tokens, d channels per head.
"""

from typing import Any

import torch
from timm.layers.attention import Attention, AttentionRope
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from timm.models.eva import EvaAttention
from torch import Tensor, nn
from torch.nn import functional as F

KNOWN_ATTENTION: tuple[type[nn.Module], ...] = (Attention, AttentionRope, EvaAttention)


def _split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


def _rotate(x: Tensor, rope: Tensor, prefix: int, half: bool) -> Tensor:
    """Rotates the patch tokens' channels by their positions; prefix tokens have none."""
    return torch.cat([x[:, :, :prefix], apply_rot_embed_cat(x[:, :, prefix:], rope, half=half)], dim=2)


def project(attn: Any, x: Tensor, rope: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (B, H, N, d), normalized and rotated as the layer itself does.

    Args:
        attn: one of `KNOWN_ATTENTION`.
        x: (B, N, D), after the block's norm.
        rope: rotary positions as timm hands them to the block.
    """
    if isinstance(attn, Attention):
        q, k, v = attn.qkv(x).unflatten(2, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return attn.q_norm(q), attn.k_norm(k), v
    if attn.q_proj is not None:
        q = _split(attn.q_proj(x), attn.num_heads)
        groups = getattr(attn, "num_kv_heads", attn.num_heads)
        k, v = _split(attn.k_proj(x), groups), _split(attn.v_proj(x), groups)
    else:
        if getattr(attn, "q_bias", None) is not None:
            qkv = F.linear(x, attn.qkv.weight, torch.cat((attn.q_bias, attn.k_bias, attn.v_bias)))
        else:
            qkv = attn.qkv(x)
        q, k, v = qkv.unflatten(2, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    q, k = attn.q_norm(q), attn.k_norm(k)
    if rope is not None:
        half = getattr(attn, "rotate_half", False)
        q = _rotate(q, rope, attn.num_prefix_tokens, half).type_as(v)
        k = _rotate(k, rope, attn.num_prefix_tokens, half).type_as(v)
    repeats = getattr(attn, "num_kv_groups", 1)
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    return q, k, v


def attend(attn: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """softmax(scale * q k^T + bias) v, (B, H, N, d), fused where the layer is.

    Args:
        attn: the layer, for its scale and dropout.
        q, k, v: (B, H, N, d).
        bias: additive, broadcast to (B, H, N, N).
    """
    if attn.fused_attn:
        rate = attn.attn_drop.p if attn.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=rate, scale=attn.scale)
    return attn.attn_drop(logits_of(attn, q, k, bias).softmax(dim=-1)) @ v


def finish(attn: Any, x: Tensor, mixed: Tensor) -> Tensor:
    """Joins the heads and projects: (B, H, N, d) -> (B, N, D). `x` is what `project` was given."""
    out = attn.norm(mixed.transpose(1, 2).flatten(2))
    gate = attn._modules.get("gate")
    if gate is not None:
        out = out * gate(x).sigmoid()
    return attn.proj_drop(attn.proj(out))


def logits_of(attn: Any, q: Tensor, k: Tensor, bias: Tensor | None = None) -> Tensor:
    """Pre-softmax logits of some query rows: (B, H, R, N).

    Args:
        attn: the layer, for its scale.
        q: the rows, (B, H, R, d).
        k: (B, H, N, d).
        bias: broadcast to (B, H, R, N), added where given.
    """
    logits = (q * attn.scale) @ k.mT
    return logits if bias is None else logits + bias
