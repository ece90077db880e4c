"""The HTTP service: continuous batching across stages, a budget that follows the load, limits and metrics."""

from tokensworth.serve.app import Settings, make_app
from tokensworth.serve.governor import Governor
from tokensworth.serve.scheduler import Busy, Scheduler
from tokensworth.serve.uploads import UploadLimits

__all__ = ["Busy", "Governor", "Scheduler", "Settings", "UploadLimits", "make_app"]
