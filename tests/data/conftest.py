import random
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hotloop.data import Loader
from hotloop.hardware import Processes


@pytest.fixture(autouse=True)
def _one_thread_and_fixed_streams():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def load():
    """A loader on one CPU process."""

    def make(source, **settings):
        return Loader(source, device=torch.device("cpu"), processes=Processes(), **settings)

    return make


class _Board:
    """Ranks as threads of one process that run one at a time and meet where real ones would talk."""

    def __init__(self, world):
        self.world = world
        self.slots = [None] * world
        self.barrier = threading.Barrier(world)
        self.turn = threading.Lock()

    def exchange(self, rank, value):
        self.slots[rank] = value
        self.turn.release()
        try:
            self.barrier.wait(timeout=120)
            found = list(self.slots)
            self.barrier.wait(timeout=120)
        finally:
            self.turn.acquire()
        return found


class _BoardAgreement:
    def __init__(self, board, rank):
        self.board, self.rank, self.world = board, rank, board.world

    def share(self, value):
        return self.board.exchange(self.rank, value)[0]

    def share_batches(self, batches, facts):
        return self.board.exchange(self.rank, (batches, facts))[0]

    def gather(self, row):
        return self.board.exchange(self.rank, row)

    def begin(self, first, second):
        rows = self.gather([first, second])
        return SimpleNamespace(wait=lambda: rows)


@pytest.fixture
def simulate(monkeypatch):
    """`simulate(world, program)`: the results of `program(rank, make_loader)` for each rank, in order."""

    def run(world, program):
        board = _Board(world)
        results, errors = [None] * world, [None] * world
        monkeypatch.setattr(
            "hotloop.data.loader.Agreement", lambda processes, name: _BoardAgreement(board, processes.rank)
        )

        def work(rank):
            processes = Processes(rank, world, rank, world)

            def make(source, **settings):
                return Loader(source, device=torch.device("cpu"), processes=processes, **settings)

            with board.turn:
                try:
                    results[rank] = program(rank, make)
                except BaseException as error:
                    errors[rank] = error
                    if not isinstance(error, threading.BrokenBarrierError):
                        results[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=240)
        assert not any(thread.is_alive() for thread in threads)
        return results

    return run
