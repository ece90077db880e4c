"""Adaptive in minutes: a calibrated cascade from one pretrained ViT and labelled images."""

from tokensworth.jobs.tune.job import TuneJob
from tokensworth.jobs.tune.run import Tuned, Tuning

__all__ = ["TuneJob", "Tuned", "Tuning"]
