"""The hash that finds ranks that drift apart."""

import numpy as np
import pytest
import torch

from ddpjob_trainer.gradients.replica_check import _ROW, _first_difference, hash_tensors
from ddpjob_trainer.state.codec import raw


def hashed(tensor: torch.Tensor) -> int:
    return int(hash_tensors([tensor])[0])


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64,
     torch.int8, torch.bool],
)  # fmt: skip
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 1000])
def test_equal_content_has_one_hash_however_it_lies_in_memory(dtype, count):
    torch.manual_seed(count)
    tensor = torch.randn(count, 3).to(dtype)
    expected = hashed(tensor)
    assert hashed(tensor.clone()) == expected
    assert hashed(tensor.t().contiguous().t()) == expected
    shifted = torch.zeros(tensor.numel() + 1, dtype=dtype)[1:].view(count, 3)
    shifted.copy_(tensor)
    assert hashed(shifted) == expected


@pytest.mark.parametrize("count", [1, 2, 5, 100, 4 * _ROW + 3])
def test_each_flipped_bit_shows(count):
    tensor = torch.randn(count)
    before = hashed(tensor)
    for place in {0, count // 2, count - 1}:
        for bit in (0, 1, 22, 23, 30, 31):
            flipped = tensor.clone()
            flipped.view(torch.int32)[place] ^= 1 << bit if bit < 31 else -(2**31)
            assert hashed(flipped) != before, (place, bit)


def test_pairs_of_changes_do_not_cancel():
    torch.manual_seed(1)
    tensor = torch.randn(2 * _ROW * 2 + 100)
    before = hashed(tensor)
    words = tensor.view(torch.int32)
    for _ in range(50):
        i, j = torch.randint(0, len(words), (2,)).tolist()
        for change in (1, -(2**31)):  # up one and down one in the last place; two signs
            changed = words.clone()
            changed[i] += change
            changed[j] -= change
            assert (hashed(changed) != before) == (i != j)
        swapped = words.clone()
        swapped[i], swapped[j] = words[j], words[i]
        assert hashed(swapped) != before


def test_a_shape_or_a_zeros_sign_is_no_matter_of_luck():
    assert hashed(torch.zeros(8)) != hashed(-torch.zeros(8))
    assert len({hashed(torch.ones(n)) for n in range(50)}) == 50
    assert hash_tensors([]).tolist() == []
    # Ranks of one gang might run different builds.
    assert hashed(torch.arange(10, dtype=torch.float32)) == 3597304182156034048


def test_where_two_ranks_differ_first():
    for theirs, place in (
        ([1, 2, 3], None),
        ([1, 0, 0], 1),
        ([1, 2], 2),  # a buffer that only one of them has
        ([1, 2, 3, 4], 3),
        ([0], 0),
    ):
        assert _first_difference(np.array(theirs), np.array([1, 2, 3])) == place


def test_a_single_element_lies_as_its_tensor_does():
    of_a_table, negative = torch.full((3, 2), 7.0)[:1, 0], torch.full((1,), complex(1, -7))
    for tensor in (of_a_table, negative.conj().imag):
        assert hashed(tensor) == hashed(torch.tensor([7.0]))
        assert bytes(raw(tensor)) == bytes(raw(torch.tensor([7.0])))
