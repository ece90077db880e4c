import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from tokensworth.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(10**8, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
# At first a block may be a little too small to serve again; after some, there is one for every wish.
for _ in range(20):
    faults()
print(sum(faults() for _ in range(3)))
"""


def faults(how: str, environment: dict[str, str] | None = None) -> int:
    run = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return int(run.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator only")
def test_freed_memory_is_used_again():
    # A hundred megabytes are 25,000 pages of 4 KiB, or 50 of 2 MiB.
    assert faults("kept", {}) < 10 < faults("given back", {})


def test_a_decision_in_the_environment_stands():
    assert faults("given back", {"MALLOC_TRIM_THRESHOLD_": "1000000"}) > 10
    with pytest.raises(AssertionError):
        faults("kept", {"MALLOC_TRIM_THRESHOLD_": "1000000"})
