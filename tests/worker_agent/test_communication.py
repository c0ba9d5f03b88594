import pytest
import torch

from scheduler_service.domain import InvalidInputError
from tests.support.ranks import run_ranks
from worker_agent.communication import (
    ByteCounters,
    all_to_all,
    exchange,
    start_all_gather,
    start_all_to_all,
    start_reduce_scatter,
)
from worker_agent.groups import GroupRegistry


def sent_rows(sender: int, receiver: int, ranks: int) -> int:
    """Uneven, with zeros."""
    return (3 * sender + 2 * receiver) % (ranks + 1)


def ragged_exchange(rank: int) -> None:
    group = GroupRegistry().group(0, 3)
    sends = [sent_rows(rank, other, 3) for other in range(3)]
    receives = [sent_rows(other, rank, 3) for other in range(3)]
    for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.bool):
        counters = ByteCounters()
        x = torch.tensor([[rank, other] for other in range(3) for _ in range(sends[other])]).reshape(-1, 2).to(dtype)
        y = all_to_all(x, receives, sends, group.process_group, counters, "reroute")
        expected = [[other, rank] for other in range(3) for _ in range(receives[other])]
        assert y.tolist() == torch.tensor(expected).reshape(-1, 2).to(dtype).tolist()
        away = sum(sends) - sends[rank]
        assert counters.snapshot() == {"reroute": away * 2 * x.element_size()}


def differentiable_exchange(rank: int) -> None:
    group = GroupRegistry().group(0, 3)
    sends = [sent_rows(rank, other, 3) for other in range(3)]
    receives = [sent_rows(other, rank, 3) for other in range(3)]
    counters = ByteCounters()
    x = torch.randn(sum(sends), 4, dtype=torch.float64, requires_grad=True)
    y = exchange(x, receives, sends, group.process_group, counters, "ep")
    (y * torch.full_like(y, rank + 1.0)).sum().backward()
    receivers = torch.tensor([other + 1.0 for other in range(3) for _ in range(sends[other])])
    assert x.grad is not None
    assert x.grad.tolist() == receivers[:, None].expand(-1, 4).tolist()
    assert counters.snapshot()["ep"] == (sum(sends) - sends[rank] + sum(receives) - receives[rank]) * 4 * 8


def gathered_and_summed(rank: int) -> None:
    group, counters = GroupRegistry().group(0, 3).process_group, ByteCounters()
    x = torch.tensor([[rank, 0.5], [rank, 1.5]], dtype=torch.bfloat16)
    gathered = start_all_gather(x, group, counters, "ulysses").wait()
    assert gathered.tolist() == [[other, half] for other in range(3) for half in (0.5, 1.5)]
    assert counters.snapshot() == {"ulysses": 2 * x.numel() * 2}

    # 256 + 1 is 256 in bf16: only a sum in fp32 keeps both ones.
    parts = torch.tensor([256.0, 1.0, 1.0], dtype=torch.bfloat16)[rank].repeat(6, 2)
    summed = start_reduce_scatter(parts, group, counters, "ulysses").wait()
    assert summed.dtype == torch.bfloat16
    assert summed.tolist() == [[258.0, 258.0]] * 2
    assert counters.snapshot() == {"ulysses": 2 * 2 * x.numel() * 2}, "as many bytes again"


def several_at_once(rank: int) -> None:
    """Waited for in another order than launched."""
    group, counters = GroupRegistry().group(0, 3).process_group, ByteCounters()
    ones = [1, 1, 1]
    sent = [torch.tensor([[100 * number + 10 * rank + other] for other in range(3)]) for number in range(4)]
    transfers = [start_all_to_all(x, ones, ones, group, counters, "ep") for x in sent]
    for number in (2, 0, 3, 1):
        arrived = transfers[number].wait()
        assert arrived.flatten().tolist() == [100 * number + 10 * other + rank for other in range(3)]


def test_uneven_rows_of_any_dtype_arrive_in_the_order_of_their_senders() -> None:
    run_ranks(3, ragged_exchange)


def test_the_gradient_goes_back_the_way_its_row_came() -> None:
    run_ranks(3, differentiable_exchange)


def test_a_gather_and_its_transpose_send_as_many_bytes_and_sum_in_a_wide_type() -> None:
    run_ranks(3, gathered_and_summed)


def test_exchanges_under_way_at_once_do_not_mix() -> None:
    run_ranks(3, several_at_once)


def test_a_rank_alone_keeps_its_rows_and_sends_nothing() -> None:
    counters = ByteCounters()
    x = torch.arange(6.0).reshape(3, 2).requires_grad_()
    y = exchange(x, [3], [3], None, counters, "ep")
    y.sum().backward()
    assert torch.equal(y, x)
    assert x.grad is not None
    assert (x.grad == 1).all()
    assert counters.snapshot() == {}


def test_counts_that_fit_neither_group_nor_tensor_are_refused() -> None:
    x, counters = torch.zeros(3, 2), ByteCounters()
    with pytest.raises(InvalidInputError, match="one count per rank"):
        all_to_all(x, [1, 2], [1, 2], None, counters, "ep")
    with pytest.raises(InvalidInputError, match="cannot be cut into rows"):
        all_to_all(x, [2], [2], None, counters, "ep")
    with pytest.raises(InvalidInputError, match="sends itself 3 rows and expects 2"):
        all_to_all(x, [2], [3], None, counters, "ep")
