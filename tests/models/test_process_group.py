"""Sharing out: everything is somebody's, nothing is anybody else's; alone it costs nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grouper.models.process_group import ProcessGroup, share_of


@given(count=st.integers(0, 40), size=st.integers(1, 9))
def test_shares_are_a_partition_of_nearly_equal_parts(count: int, size: int) -> None:
    shares = [share_of(range(count), rank, size) for rank in range(size)]
    assert [i for share in shares for i in share] == list(range(count))
    lengths = [len(share) for share in shares]
    assert max(lengths) - min(lengths) <= 1


def test_alone_everything_is_ones_own() -> None:
    processes = ProcessGroup()
    tensor = torch.tensor([1.0])
    processes.sum_(tensor)
    assert tensor.tolist() == [1.0]
    assert processes.gather("x") == ["x"]
    assert processes.on_rank0(lambda: 3) == 3


@pytest.mark.slow
def test_one_process_uses_no_distributed_code() -> None:
    """DESIGN 5: no process group is made."""
    script = (
        "import sys, torch\n"
        "from grouper.training.parallel import join_processes\n"
        "group = join_processes()\n"
        "assert type(group).__name__ == 'ProcessGroup'\n"
        "assert not torch.distributed.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
