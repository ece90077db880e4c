"""How sure an exit is: one number per image, higher is surer, so that an image leaves where score >= threshold."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tokensworth.errors import PolicyError
from tokensworth.exits.learned import LEARNED, Rule, learned_score

# Thresholds beyond every score: an exit that takes every image, and one that takes none.
ALWAYS, NEVER = -1.0, 2.0


def confidence(probabilities: Tensor, positions: Tensor, exit_index: int) -> Tensor:
    """The largest probability, the DVT paper's rule."""
    return probabilities.amax(dim=1)


def entropy(probabilities: Tensor, positions: Tensor, exit_index: int) -> Tensor:
    """One minus the entropy as a share of its maximum."""
    spread = torch.special.entr(probabilities).sum(dim=1) / math.log(probabilities.shape[1])
    return (1 - spread).clamp(0, 1)


def margin(probabilities: Tensor, positions: Tensor, exit_index: int) -> Tensor:
    """The largest probability less the second largest."""
    top = probabilities.topk(2, dim=1).values
    return top[:, 0] - top[:, 1]


def chance(probabilities: Tensor, positions: Tensor, exit_index: int) -> Tensor:
    """A fixed random number per image position and exit: the floor that every rule must beat."""
    mixed = (positions.long() + 1) * 0x9E3779B1 + (exit_index + 1) * 0x85EBCA77
    for multiplier in (0x27D4EB2F, 0x165667B1):
        mixed = ((mixed ^ (mixed >> 15)) * multiplier) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 13)).double().div(2**32).float()


Score = Callable[[Tensor, Tensor, int], Tensor]
# The same with what earlier exits said, (B, e, 2): label and confidence of each.
Judge = Callable[[Tensor, Tensor, int, Tensor], Tensor]

SCORES: dict[str, Score] = {
    "confidence": confidence,
    "entropy": entropy,
    "margin": margin,
    "random": chance,
}


def find_score(name: str) -> Score:
    """The function of a score's name: probabilities (B, C), positions (B,), exit index -> (B,) in [0, 1].

    Raises:
        PolicyError: no such score; the message lists them.
    """
    if name not in SCORES:
        raise PolicyError(f"unknown score {name!r}; choose one of {', '.join(SCORES)} or {LEARNED}")
    return SCORES[name]


def make_judge(name: str, rule: Rule = ()) -> Judge:
    """A score by its name, or the learned `rule`: probabilities, positions, exit index, earlier exits -> (B,).

    Raises:
        PolicyError: no such score, or no rule for the learned one.
    """
    if name != LEARNED:
        score = find_score(name)
        return lambda probabilities, positions, index, earlier: score(probabilities, positions, index)
    if not rule:
        raise PolicyError("the learned score needs the rule that was fitted")
    # The last exit takes everybody; its score counts for nothing.
    return lambda probabilities, positions, index, earlier: (
        learned_score(rule[index], probabilities, earlier) if index < len(rule) else probabilities.amax(dim=1)
    )


def softmax(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Probabilities (B, C) in float32."""
    return (logits.float() / temperature).softmax(dim=1)


def read_answer(logits: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (B, C) to probabilities (B, C), the largest of each (B,), and labels (B,).

    The label comes from the logits, so that no temperature can change it.
    """
    probabilities = softmax(logits, temperature)
    return probabilities, probabilities.amax(dim=1), logits.argmax(dim=1)
