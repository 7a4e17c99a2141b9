"""Saving from an accelerator: nobody waits, and what is overwritten at once is saved as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hotloop.loop.checkpoint import Checkpoints, Snapshot

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def busy() -> None:
    """About a tenth of a second of work on the device."""
    torch.cuda._sleep(200_000_000)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_the_host_does_not_wait_and_the_copy_is_of_its_moment(tmp_path: Path) -> None:
    large = torch.zeros(8 << 20, device="cuda")
    small = [torch.zeros(n, device="cuda") for n in (0, 1, 3, 1000)]
    rows = torch.zeros(64, 64, device="cuda")
    lattice = torch.zeros(2, 8, 4, 4, device="cuda").contiguous(memory_format=torch.channels_last)
    cpu = torch.zeros(5)
    parameter = torch.nn.Parameter(torch.zeros(7, device="cuda"))
    everything = [large, *small, rows, lattice, cpu, parameter.data]
    checkpoints = Checkpoints()

    def snapshot(step: int) -> Snapshot:
        part = {f"small {i}": tensor for i, tensor in enumerate(small)}
        part |= {"large": large, "tied": large, "column": rows[:, 1], "lattice": lattice, "cpu": cpu}
        return Snapshot(step, {"part": part}, {"o": {"p": parameter, "s": small[2], "same": large}})

    # The first save allocates pinned memory, which may stop the device; the ones that follow use it again.
    checkpoints.save(tmp_path, snapshot(0), wait=True)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for step in (1, 2, 3):
            checkpoints.wait()
            busy()  # the values of this step are not there yet when save is called
            for tensor in everything:
                tensor.fill_(step)
            checkpoints.save(tmp_path, snapshot(step), keep=None)
            done = torch.cuda.Event()
            done.record()
            assert not done.query(), "save waited for the device"
            for tensor in everything:
                tensor.fill_(-1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    checkpoints.wait()
    for step in (1, 2, 3):
        loaded = checkpoints.load(tmp_path / f"step-{step:010d}")
        assert loaded is not None
        part, objects = loaded.tensors["part"], loaded.objects["o"]
        for tensor in [*part.values(), *objects.values()]:
            assert tensor.device.type == "cpu"
            assert tensor.double().eq(step).all()
        assert part["tied"] is part["large"]
        assert part["lattice"].stride() == lattice.stride()
        assert part["column"].shape == (64,)
        assert isinstance(objects["p"], torch.nn.Parameter)
        assert objects["s"].untyped_storage().nbytes() == 12
    # One small tensor must not drag the block that it was copied in onto the disk.
    assert (tmp_path / "step-0000000003" / "o.pt").stat().st_size < large.nbytes + 10_000


def test_a_save_on_another_stream_is_of_that_stream(tmp_path: Path) -> None:
    checkpoints = Checkpoints()
    stream = torch.cuda.Stream()
    value = torch.zeros(1 << 20, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        value.fill_(5)
        checkpoints.save(tmp_path, Snapshot(1, {"m": {"w": value}}))
        value.fill_(6)
    loaded = checkpoints.load(tmp_path)
    assert loaded is not None
    assert loaded.tensors["m"]["w"].eq(5).all()
    stream.synchronize()
