"""Exits: scores, calibration, solvers, policies, frontiers."""

from tokensworth.exits.calibration import Calibration, calibrate
from tokensworth.exits.goals import Accuracy, Macs, Millis
from tokensworth.exits.policy import Policy
from tokensworth.exits.solve import Frontier, frontier, solve

__all__ = [
    "Accuracy",
    "Calibration",
    "Frontier",
    "Macs",
    "Millis",
    "Policy",
    "calibrate",
    "frontier",
    "solve",
]
