"""A learned exit rule: how little an image has to gain from the stages still to come, from all that exits have said.

One logistic regression per exit, on six numbers; fitted on calibration images, carried by the policy.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

# Bias and weights of `evidence` for every exit but the last.
Rule = tuple[tuple[float, ...], ...]

LEARNED = "learned"
_LIMIT = 1e-4
_PENALTY = 1e-3
WIDTH = 6


def _log_odds(confidence: Tensor) -> Tensor:
    """Of a probability, within those of 0.0001 and 0.9999."""
    return confidence.clamp(_LIMIT, 1 - _LIMIT).logit()


def evidence(probabilities: Tensor, earlier: Tensor) -> Tensor:
    """What the rule looks at: (B, 6).

    Log-odds of the confidence and its square, margin, entropy as a share, share of earlier exits that gave the same
    label, log-odds of the confidence before; the last two are 0 at the first exit.

    Args:
        probabilities: (B, C) of this exit.
        earlier: (B, e, 2), label and confidence of each exit before.
    """
    top = probabilities.topk(2, dim=1)
    sure = _log_odds(top.values[:, 0])
    spread = torch.special.entr(probabilities).sum(dim=1) / math.log(probabilities.shape[1])
    if earlier.shape[1]:
        agreed = (earlier[:, :, 0] == top.indices[:, :1]).to(sure.dtype).mean(dim=1)
        before = _log_odds(earlier[:, -1, 1])
    else:
        agreed = before = torch.zeros_like(sure)
    return torch.stack([sure, sure.square(), top.values.diff(dim=1).squeeze(1).neg(), spread, agreed, before], dim=1)


def learned_score(rule: Sequence[float], probabilities: Tensor, earlier: Tensor) -> Tensor:
    """The rule's score (B,) in [0, 1], higher where less is to be gained: see `evidence`."""
    weights = torch.tensor(rule, dtype=probabilities.dtype, device=probabilities.device)
    return (evidence(probabilities, earlier) @ weights[1:] + weights[0]).sigmoid()


def fit_rule(exits: Sequence[Tensor], labels: Tensor) -> Rule:
    """Fits the rule of every exit but the last.

    The target is (1 + right now - right at the last exit) / 2: 0 where only going on helps, 1 where it harms.

    Args:
        exits: probabilities (N, C) of each exit.
        labels: (N,).
    """
    answers = [p.argmax(dim=1) for p in exits]
    finally_right = (answers[-1] == labels).double()
    earlier = torch.empty(len(labels), 0, 2)
    rules = []
    for probabilities, answer in zip(exits[:-1], answers[:-1], strict=True):
        target = (1 + (answer == labels).double() - finally_right) / 2
        rules.append(_fit(evidence(probabilities, earlier).double(), target))
        earlier = remember(earlier, answer, probabilities.amax(dim=1))
    return tuple(rules)


def remember(earlier: Tensor, labels: Tensor, confidences: Tensor) -> Tensor:
    """One more exit's labels (B,) and confidences (B,) behind those before: (B, e + 1, 2)."""
    said = torch.stack([labels.to(confidences.dtype), confidences], dim=1)
    return torch.cat([earlier.to(said.dtype), said.unsqueeze(1)], dim=1)


def _fit(x: Tensor, target: Tensor) -> tuple[float, ...]:
    """Logistic regression on standardized columns; a column without any spread has no weight."""
    mean, deviation = x.mean(dim=0), x.std(dim=0)
    flat = deviation < 1e-9
    z = (x - mean) / deviation.clamp(min=1e-9)
    z[:, flat] = 0
    weights = torch.zeros(x.shape[1] + 1, dtype=x.dtype, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        logits = z @ weights[1:] + weights[0]
        loss = F.binary_cross_entropy_with_logits(logits, target) + _PENALTY * weights[1:].square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)  # type: ignore[arg-type]
    plain = weights.detach()[1:] / deviation.clamp(min=1e-9)
    plain[flat] = 0
    bias = weights.detach()[0] - plain @ mean
    return (float(bias), *(float(w) for w in plain))
