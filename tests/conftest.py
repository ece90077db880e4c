import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

# Models here are tiny: one thread is faster than two, and answers do not depend on the machine's load.
torch.set_num_threads(1)
settings.register_profile("tests", deadline=None, derandomize=True)
settings.load_profile("tests")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
