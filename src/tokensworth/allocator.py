"""The C library's memory allocator, set so that tensors of a CPU find their memory again.

glibc gives large freed blocks back to the system at once and asks anew for the next tensor, whose pages the kernel
must then clear one by one: a tenth of a ViT's time at batch 16, more where tensors are larger. PyTorch's own tuning
guide advises another allocator for that; this needs none installed.
"""

import ctypes
import os
import platform

_MMAP_MAX, _TRIM_THRESHOLD, _TOP_PAD = -4, -1, -2

# Whether this process keeps the memory it frees.
kept = False


def keep_freed_memory() -> bool:
    """Makes this process keep the memory it frees for what it allocates next; it holds its highest mark until it ends.

    Does nothing where the C library is not glibc, or where its settings in the environment (MALLOC_..., or
    GLIBC_TUNABLES) say that somebody has decided already.

    Returns:
        Whether it does now.
    """
    global kept
    decided = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if not decided and platform.libc_ver()[0] == "glibc":
        settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 64 * 2**20))
        kept = all(ctypes.CDLL(None).mallopt(name, value) for name, value in settings)
    return kept
