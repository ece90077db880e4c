"""Which number format a machine trains in fastest."""

import torch

from tokensworth.errors import TrainingError

PRECISIONS = ("auto", "fp32", "bf16")


def native_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 in hardware; where it does not, bfloat16 is several times slower."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return False
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in probes)


def choose_precision(name: str, device: torch.device) -> str:
    """Accelerate's name (`no` or `bf16`) for one of `PRECISIONS`.

    Raises:
        TrainingError: an unknown name.
    """
    if name not in PRECISIONS:
        raise TrainingError(f"precision {name!r} is not one of {', '.join(PRECISIONS)}")
    if name == "auto":
        return "bf16" if native_bf16(device) else "no"
    return "bf16" if name == "bf16" else "no"
