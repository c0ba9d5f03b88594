"""What `make gpu-check` does can be shown without a GPU, but for the figures."""

from __future__ import annotations

import pytest
import torch

from tests.benchmarks import gpu_check
from worker_agent.attention.kernels import KERNELS, select_kernel

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu_it_says_so_names_every_kernel_and_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main() == 2
    told = capsys.readouterr().out
    assert "needs an NVIDIA GPU" in told
    assert all(kernel.name in told for kernel in KERNELS)


def test_a_kernel_is_timed_forward_and_backward() -> None:
    heads = gpu_check.Heads("small", 2, 1, 8, 8)
    timing = gpu_check.time_kernel(select_kernel(CPU, torch.bfloat16, 8, 8), CPU, torch.bfloat16, heads, [5, 7])
    assert timing.forward_s > 0
    assert timing.backward_s > 0
    assert timing.forward_flop == 2 * (8 + 8) * (5**2 + 7**2)


def test_exchange_computation_and_both_at_once_are_measured_in_both_directions() -> None:
    parts = gpu_check.measure_overlap("cpu", ranks=2, tokens=16, runs=1)
    assert [part.direction for part in parts] == ["forward", "backward"]
    assert all(min(part.exchange_s, part.compute_s, part.together_s) > 0 for part in parts)
