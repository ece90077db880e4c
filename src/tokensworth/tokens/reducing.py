"""What methods share that leave later layers fewer tokens: their blocks, and what is known from layer to layer."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from timm.models.eva import Eva
from torch import Tensor, nn

from tokensworth.errors import UnsupportedModelError
from tokensworth.tokens.gather import take_rope
from tokensworth.tokens.halves import Seen, attention_half, check_block, mlp_half
from tokensworth.tokens.method import Adapted, Method
from tokensworth.tokens.notes import Notes
from tokensworth.tokens.sequence import Tokens, first_rows
from tokensworth.tokens.vit import ViT


class Reducing(Adapted):
    """A method on one vision transformer that drops or merges tokens as it goes.

    A method overrides `between`, where the sequence changes between attention and MLP, or `before`, where it changes
    before a block, and names the layers in which it does.

    Args:
        method: the options.
        vit: the model; its blocks are changed.
        between: layers, from 1, in which the sequence changes between attention and MLP.
        before: layers before which it changes.
        followed: whether layers in between must know of it too, because of sizes or policies.

    Raises:
        UnsupportedModelError: a block or an attention of an unknown kind, or no such layer.
    """

    def __init__(
        self,
        method: Method,
        vit: ViT,
        between: Iterable[int] = (),
        before: Iterable[int] = (),
        followed: bool = False,
    ) -> None:
        super().__init__(method)
        self.cut, self.led = frozenset(between), frozenset(before)
        self.prefix: int = vit.num_prefix_tokens
        self.has_class: bool = getattr(vit, "cls_token", None) is not None
        self.follows_places = isinstance(vit, Eva)  # whose rotary positions must go with the tokens
        self.follows_source = False
        self.record: Callable[[int, Tokens], None] | None = None
        layers = sorted(self.cut | self.led)
        for layer in layers:
            check_block(vit, layer)
        last = len(vit.blocks)
        if followed or self.follows_places:
            layers = list(range(layers[0], last + 1))
        self._last = len(layers) - 1
        self._known = Notes()
        for place, layer in enumerate(layers):
            self.swaps.swap(vit.blocks[layer - 1], ReducingBlock, reducing=(place, layer, self))

    def before(self, layer: int, tokens: Tokens) -> Tokens:
        """The sequence that a layer gets."""
        return tokens

    def between(self, layer: int, tokens: Tokens, seen: Seen) -> Tokens:
        """The sequence that a layer's MLP gets, of the one that its attention gave."""
        return tokens

    def bias(self, tokens: Tokens) -> Tensor | None:
        """What is added to a layer's logits, broadcast to (B, H, N, N); None for nothing."""
        return None

    def finish(self, tokens: Tokens) -> Tensor:
        """What leaves the last layer."""
        return tokens.x

    def received(self, seen: Seen) -> Tensor:
        """How much attention each patch receives (B, n), heads averaged: from the class token, or from all tokens."""
        row = seen.row() if self.has_class else seen.map().mean(dim=2)
        return row.mean(dim=1)[:, self.prefix :]

    def with_prefix(self, patches: Tensor) -> Tensor:
        """Rows of patches, counted without the prefix tokens (B, K), to rows with the prefix tokens before them."""
        return torch.cat([first_rows(self.prefix, patches), patches + self.prefix], dim=1) if self.prefix else patches

    def enter(self, place: int, x: Tensor) -> Tokens:
        """The tokens before a layer, with what the layers before it noted."""
        known = self._known.get(place) if place else None
        if known is not None:
            return Tokens(x, *known)
        every = first_rows(x.shape[1], x)
        places = every if self.follows_places else None
        return Tokens(x, x.shape[1] - self.prefix, places, source=every if self.follows_source else None)

    def leave(self, place: int, layer: int, tokens: Tokens) -> Tensor:
        """Notes what the next layer must know, and gives the tokens."""
        if self.record is not None:
            self.record(layer, tokens)
        if not torch.is_grad_enabled():
            # Otherwise kept: a checkpointed layer asks again when it is run for the gradients.
            self._known.pop(place, None)
        if place == self._last:
            return self.finish(tokens)
        self._known[place + 1] = tuple(tokens[1:])
        return tokens.x


class ReducingBlock(nn.Module):
    """Mixed into a block whose sequence grows shorter."""

    reducing: tuple[int, int, Reducing]

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        place, layer, added = self.reducing
        if not added.enabled:
            options: dict[str, Any] = {} if rope is None else {"rope": rope}
            return super().forward(x, **options, attn_mask=attn_mask, is_causal=is_causal)  # type: ignore[misc]
        if attn_mask is not None or is_causal:
            raise UnsupportedModelError(f"{added.method.name} cannot run with an attention mask")
        tokens = added.enter(place, x)
        if layer in added.led:
            tokens = added.before(layer, tokens)
        if rope is not None and tokens.places is not None and (place or layer in added.led):
            rope = take_rope(rope, tokens.places, added.prefix)
        bias = added.bias(tokens)
        if layer in added.cut or tokens.policy is not None:
            after, seen = attention_half(self, tokens.x, rope, bias, tokens.policy)
            tokens = tokens._replace(x=after)
            if layer in added.cut:
                tokens = added.between(layer, tokens, seen)
            del after, seen, bias  # the MLP's memory is the most a layer needs
            tokens = tokens._replace(x=mlp_half(self, tokens.x))
        else:
            options = {} if rope is None else {"rope": rope}
            tokens = tokens._replace(x=super().forward(tokens.x, **options, attn_mask=bias))  # type: ignore[misc]
        return added.leave(place, layer, tokens)
