"""Which device a tensor counts as, with and without memory."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from grouper.kernels.switch import device_type, has_memory, planned, representative


def test_tensors_are_where_they_are() -> None:
    assert device_type(torch.zeros(1)) == "cpu"
    assert device_type(torch.empty(1, device="meta")) == "meta"


def test_what_has_no_memory_counts_as_planned() -> None:
    with FakeTensorMode():
        fake = torch.empty(1)
    shape_only = torch.empty(1, device="meta")
    assert not has_memory(fake)
    assert not has_memory(shape_only)
    assert has_memory(torch.zeros(1))
    with planned("cuda"):
        assert device_type(fake) == device_type(shape_only) == "cuda"
        assert device_type(torch.zeros(1)) == "cpu"
        with planned("cpu"):
            assert device_type(shape_only) == "cpu"
        assert device_type(shape_only) == "cuda"
    assert device_type(fake) == "cpu"


def test_only_a_plan_for_the_cpu_leaves_out_parts_of_a_loop() -> None:
    shape_only, parts = torch.empty(1, device="meta"), range(0, 60, 10)
    with planned("cpu"):
        assert [*representative(parts, shape_only)] == [0, 10, 50]
        assert [*representative(parts[:3], shape_only)] == [0, 10, 20]
        assert representative(parts, torch.zeros(1)) == parts
    with planned("cuda"):  # its traffic is counted
        assert representative(parts, shape_only) == parts
