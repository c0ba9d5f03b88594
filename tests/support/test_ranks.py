import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.ranks import run_ranks


def _sum(rank: int) -> int:
    value = torch.tensor(rank + 1)
    dist.all_reduce(value)
    return int(value)


def _fail(rank: int) -> None:
    if rank == 1:
        raise ValueError("on purpose")


def test_ranks_form_one_group():
    assert run_ranks(4, _sum) == [10, 10, 10, 10]


def test_a_failing_rank_fails_the_caller_with_its_traceback():
    with pytest.raises(AssertionError, match="on purpose"):
        run_ranks(2, _fail, timeout_s=20)


def _tensor(rank: int) -> Tensor:
    return torch.full((100_000,), float(rank))


def test_tensors_come_back_from_ranks_that_have_ended():
    assert [x.sum().item() for x in run_ranks(2, _tensor)] == [0.0, 100_000.0]
