"""DVT: a cascade of vision transformers with feature and relation reuse."""

from tokensworth.cascade.cascade import Cascade
from tokensworth.cascade.config import CascadeConfig, Reuse
from tokensworth.cascade.reuse import Upstream
from tokensworth.cascade.storage import model_hash

__all__ = ["Cascade", "CascadeConfig", "Reuse", "Upstream", "model_hash"]
