import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from worker_agent.attention.merge import merge

Part = tuple[Tensor, Tensor]


@st.composite
def three_parts(draw: st.DrawFn) -> tuple[Part, Part, Part]:
    """Attention of the same rows over three disjoint sets of keys, some of them empty."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = draw(st.sampled_from([1.0, 30.0, 700.0]))
    return tuple(part(generator, keys, scale) for keys in draw(st.tuples(*[st.integers(0, 5)] * 3)))  # type: ignore[return-value]


def part(generator: torch.Generator, keys: int, scale: float) -> Part:
    rows, heads, width = 4, 2, 3
    if keys == 0:
        return torch.zeros(rows, heads, width).double(), torch.full((heads, rows), -torch.inf).double()
    scores = torch.randn(heads, rows, keys, generator=generator, dtype=torch.float64) * scale
    scores[:, 0] = -torch.inf  # a row without keys in a part that has some
    values = torch.randn(keys, heads, width, generator=generator, dtype=torch.float64)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(0.0), values), scores.logsumexp(-1)


def assert_same(a: Part, b: Part) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@given(three_parts())
@settings(max_examples=150, deadline=None)
def test_order_and_grouping_do_not_matter(parts: tuple[Part, Part, Part]) -> None:
    a, b, c = parts
    assert_same(merge(*merge(*a, *b), *c), merge(*a, *merge(*b, *c)))
    assert_same(merge(*a, *b), merge(*b, *a))


@given(three_parts())
@settings(max_examples=100, deadline=None)
def test_a_part_without_keys_changes_nothing_to_the_bit(parts: tuple[Part, Part, Part]) -> None:
    nothing = (torch.zeros(4, 2, 3).double(), torch.full((2, 4), -torch.inf).double())
    for whole in parts:
        out, lse = merge(*whole, *nothing)
        assert torch.equal(out, whole[0])
        assert torch.equal(lse, whole[1])


def test_two_rows_without_keys_merge_to_a_row_of_zeros_without_keys() -> None:
    out, lse = merge(*[torch.zeros(1, 1, 2), torch.full((1, 1), -torch.inf)] * 2)
    assert out.tolist() == [[[0.0, 0.0]]]
    assert lse.tolist() == [[-torch.inf]]


def test_the_merge_of_the_halves_is_the_softmax_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 4, 10, generator=generator, dtype=torch.float64) * 50
    values = torch.randn(10, 2, 3, generator=generator, dtype=torch.float64)

    def over(keys: slice) -> Part:
        weights = scores[..., keys].softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values[keys]), scores[..., keys].logsumexp(-1)

    assert_same(merge(*over(slice(0, 3)), *over(slice(3, 10))), over(slice(0, 10)))


def test_low_precision_outputs_are_merged_in_the_dtype_of_the_log_sum_exps() -> None:
    out, lse = merge(*[torch.ones(1, 1, 2, dtype=torch.bfloat16), torch.zeros(1, 1)] * 2)
    assert out.dtype == lse.dtype == torch.float32
