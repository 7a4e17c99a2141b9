"""What a recording leaves in torch and finds there."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hotloop.hardware.recording import own_casts


class Casts(TorchDispatchMode):
    """Counts the casts made while it is entered."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._to_copy.default
        return function(*args, **(kwargs or {}))


def test_what_autocast_keeps_is_kept_neither_into_a_recording_nor_out_of_one():
    linear, x = torch.nn.Linear(4, 4), torch.ones(2, 4)

    def casts():
        with Casts() as seen:
            linear(x)
        return seen.count

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        # input, weight and bias; then the input alone
        assert [casts(), casts()] == [3, 1]
        with own_casts():
            assert [casts(), casts()] == [3, 1]
        assert [casts(), casts()] == [3, 1]
        with pytest.raises(RuntimeError, match="recorded"), own_casts():
            linear(x)
            raise RuntimeError("it cannot be recorded")
        assert [casts(), casts()] == [3, 1]
