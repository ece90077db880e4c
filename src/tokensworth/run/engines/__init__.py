"""Engines: what runs a stage on a dense batch. All give the same answers."""

from tokensworth.run.engines.engine import ENGINES, Engine, make_engine

__all__ = ["ENGINES", "Engine", "make_engine"]
