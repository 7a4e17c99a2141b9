"""The recorder of CUDA graphs, on stand-ins for torch's: what it asks of the pools of memory that graphs share."""

import itertools
from contextlib import nullcontext

import pytest
import torch

from hotloop.capture import CudaRecorder


class Pools:
    """How many graphs each pool has; as torch does it, one that has none any more is never taken again."""

    def __init__(self):
        self.numbers = itertools.count(1)
        self.graphs = {}

    def make_handle(self):
        return (0, next(self.numbers))

    def make_graph(self, keep_graph=False):
        pools = self

        class Graph:
            pool = None

            def capture_begin(self, pool, capture_error_mode):
                assert pools.graphs.get(pool) != 0, "use_count > 0 INTERNAL ASSERT FAILED"
                pools.graphs[pool] = pools.graphs.get(pool, 0) + 1
                self.pool = pool

            def capture_end(self):
                pass

            def replay(self):
                pass

            def reset(self):
                if self.pool is not None:
                    pools.graphs[self.pool] -= 1
                    self.pool = None

            __del__ = reset

        return Graph()


@pytest.fixture
def pools(monkeypatch):
    found = Pools()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", found.make_handle)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", found.make_graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return found


def make():
    return CudaRecorder(torch.device("cuda", 0), stream=object())


def test_recordings_share_a_pool_as_long_as_one_of_them_is_there(pools):
    recorder = make()
    first = recorder.record(lambda: 1)[0]
    second = recorder.record(lambda: 2)[0]
    del first
    third = recorder.record(lambda: 3)[0]
    assert pools.graphs == {(0, 1): 2}
    del second, third
    assert recorder.record(lambda: 4)[1] == 4
    assert pools.graphs == {(0, 1): 0, (0, 2): 0}


def test_recordings_apart_have_pools_of_their_own_and_end_together(pools):
    recorder = make()
    recorders = [recorder, recorder.apart(), recorder.apart()]
    made = [each.record(lambda: None)[0] for each in recorders for _ in range(2)]
    assert pools.graphs == {(0, 1): 2, (0, 2): 2, (0, 3): 2}
    recorder.close()
    assert set(pools.graphs.values()) == {0}
    made += [each.record(lambda: None)[0] for each in recorders]
    assert len(pools.graphs) == 6


def test_a_pool_that_was_given_up_is_followed_by_another(pools):
    recorder = make()
    made = [recorder.record(lambda: None)[0] for _ in range(2)]
    recorder.drop_pool(made)
    recorder.record(lambda: None)
    assert list(pools.graphs) == [(0, 1), (0, 2)]
