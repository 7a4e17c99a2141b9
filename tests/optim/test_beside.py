"""Work beside work: all of it is done, in order where there are no streams."""

import pytest
import torch

from hotloop.optim.beside import run_beside


def test_on_the_host_one_after_the_other():
    done = []
    run_beside([lambda i=i: done.append(i) for i in range(7)], torch.device("cpu"))
    assert done == list(range(7))
    run_beside([], torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_device_all_is_there_for_what_follows():
    given = [torch.randn(300, 300, device="cuda") for _ in range(6)]
    results = [torch.empty_like(g) for g in given]

    def multiply(g, result):
        x = g
        for _ in range(20):
            x = x @ g / g.norm()
        result.copy_(x)

    works = [lambda g=g, r=r: multiply(g, r) for g, r in zip(given, results, strict=True)]
    expected = [torch.empty_like(g) for g in given]
    for g, e in zip(given, expected, strict=True):
        multiply(g, e)
    for _ in range(3):
        for r in results:
            r.zero_()
        run_beside(works, given[0].device)
        assert all(torch.equal(r, e) for r, e in zip(results, expected, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_beside(works, given[0].device)
    for g, e in zip(given, expected, strict=True):
        g.normal_()
        multiply(g, e)
    graph.replay()
    assert all(torch.equal(r, e) for r, e in zip(results, expected, strict=True))
