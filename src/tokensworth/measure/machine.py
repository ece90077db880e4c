"""What figures depend on: processor, threads, versions."""

import platform
from pathlib import Path
from typing import Any

import timm
import torch

from tokensworth import allocator


def machine() -> dict[str, Any]:
    """The machine and the versions, as plain values for a record."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "freed_memory_kept": allocator.kept,
    }
