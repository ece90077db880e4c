import torch

from tokensworth.measure.memory import peak_memory


def test_peak_counts_what_is_alive_at_once():
    def run():
        a = torch.zeros(1000, 1000)
        b = a + 1
        del a
        c = b * 2
        return c.view(-1).sum()

    assert 8_000_000 <= peak_memory(run) < 8_000_100
