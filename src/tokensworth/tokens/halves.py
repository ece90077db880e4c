"""The two halves of timm's blocks, for methods that change the sequence between attention and MLP.

Pre-norm blocks (`Block`, `EvaBlock`) and blocks that norm what a branch adds (`ResPostBlock`, `EvaBlockPostNorm`).
"""

from typing import Any, NamedTuple

import torch
from timm.models.eva import EvaBlock, EvaBlockPostNorm
from timm.models.vision_transformer import Block, ResPostBlock
from torch import Tensor, nn

from tokensworth.errors import UnsupportedModelError
from tokensworth.tokens.attention import attend, finish, logits_of, project
from tokensworth.tokens.vit import ViT, check_attention

_POST_NORM = (ResPostBlock, EvaBlockPostNorm)
KNOWN_BLOCKS: tuple[type[nn.Module], ...] = (Block, EvaBlock, *_POST_NORM)


def check_block(vit: ViT, layer: int) -> None:
    """Refuses a layer (from 1) that cannot be cut in two.

    Raises:
        UnsupportedModelError: no such layer, or a block or an attention of an unknown kind.
    """
    check_attention(vit, layer)
    kind = type(vit.blocks[layer - 1])
    if not issubclass(kind, KNOWN_BLOCKS):
        known = ", ".join(k.__name__ for k in KNOWN_BLOCKS)
        raise UnsupportedModelError(f"blocks of kind {kind.__name__} cannot be cut in two; known are {known}")


class Seen(NamedTuple):
    """What an attention layer compared.

    Attributes:
        attn: the layer.
        q, k: (B, H, N, d).
        bias: what was added to its logits, broadcast to (B, H, N, N), or None.
    """

    attn: nn.Module
    q: Tensor
    k: Tensor
    bias: Tensor | None

    def row(self) -> Tensor:
        """The first token's attention to all: (B, H, N). It is the class token's in models that have one."""
        bias = self.bias if self.bias is None or self.bias.shape[2] == 1 else self.bias[:, :, :1]
        return logits_of(self.attn, self.q[:, :, :1], self.k, bias).softmax(dim=-1)[:, :, 0]

    def map(self) -> Tensor:
        """The whole attention map (B, H, N, N)."""
        return logits_of(self.attn, self.q, self.k, self.bias).softmax(dim=-1)


def normed(block: Any, x: Tensor, half: int) -> Tensor:
    """What a branch reads: x through its norm, or x itself where the block norms what the branch adds."""
    if isinstance(block, _POST_NORM):
        return x
    return (block.norm1 if half == 1 else block.norm2)(x)


def added(block: Any, x: Tensor, out: Tensor, half: int) -> Tensor:
    """x plus what a branch gives, scaled or normed as the block does."""
    first = half == 1
    if isinstance(block, _POST_NORM):
        out = (block.norm1 if first else block.norm2)(out)
    elif isinstance(block, EvaBlock):
        gamma = block.gamma_1 if first else block.gamma_2
        out = out if gamma is None else gamma * out
    else:
        out = (block.ls1 if first else block.ls2)(out)
    return x + (block.drop_path1 if first else block.drop_path2)(out)


def attention_half(
    block: Any, x: Tensor, rope: Tensor | None = None, bias: Tensor | None = None, policy: Tensor | None = None
) -> tuple[Tensor, Seen]:
    """x (B, N, D) after attention and residual, and what the attention compared.

    Args:
        block: one of `KNOWN_BLOCKS`.
        x: the tokens.
        rope: rotary positions as timm hands them to the block.
        bias: added to the logits, broadcast to (B, H, N, N).
        policy: (B, N), 1 for tokens that are attended and 0 for others, with gradients; each attends to itself.
    """
    inner = normed(block, x, 1)
    q, k, v = project(block.attn, inner, rope)
    if policy is None:
        mixed = attend(block.attn, q, k, v, bias)
    else:
        mixed = block.attn.attn_drop(masked_softmax(logits_of(block.attn, q, k, bias), policy)) @ v
    return added(block, x, finish(block.attn, inner, mixed), 1), Seen(block.attn, q, k, bias)


def mlp_half(block: Any, x: Tensor) -> Tensor:
    """x (B, N, D) after the MLP and its residual."""
    return added(block, x, block.mlp(normed(block, x, 2)), 2)


def masked_softmax(logits: Tensor, policy: Tensor) -> Tensor:
    """Softmax over the attended keys alone, differentiable in who is attended (Rao et al. 2021, equation 9).

    Args:
        logits: (B, H, N, N).
        policy: (B, N), 1 or 0.
    """
    own = torch.eye(policy.shape[1], dtype=policy.dtype, device=policy.device)
    shown = policy[:, None, None, :] * (1 - own) + own
    weights = logits.softmax(dim=-1) * shown
    return (weights / weights.sum(dim=-1, keepdim=True).clamp(min=1e-8)).to(logits.dtype)
