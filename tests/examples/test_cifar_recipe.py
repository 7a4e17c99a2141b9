"""The CIFAR-10 recipe's runs: how one is parted, and what a step does to which layer."""

from dataclasses import replace

import pytest
import torch
from benchmarks.cifar_end import end_and_back, end_takes
from benchmarks.cifar_net import BEST, Net
from benchmarks.cifar_recipe import Trainer, phases_of

from hotloop.kernels.language import runs_on

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# its interpreter on the CPU multiplies bfloat16 as integers
BOUNDS = {torch.float16: 2e-3} | ({torch.bfloat16: 1.6e-2} if DEVICE.type == "cuda" else {})

SMALL = replace(
    BEST, batch=8, sizes=((1.0, 16), (1.0, 18)), dtype="float32", widths=(16, 16, 16), capture="eager"
)


def test_fractions_of_steps_are_carried_on():
    phases = phases_of(replace(SMALL, batch=8, sizes=((0.4, 24), (0.4, 28), (0.4, 32))), 24)
    assert [p.steps for p in phases] == [1, 1, 2]  # each is 1.2
    assert [p.size for p in phases] == [24, 28, 32]


def test_a_phase_is_whole_graphs_and_a_rest():
    (phase,) = phases_of(replace(SMALL, sizes=((2.0, 24),), batch=8), 80)
    assert phase.counts(6) == [6, 6, 6, 2]
    assert phase.counts(10) == [10, 10]


def test_a_network_differentiated_in_parts_has_the_whole_ones_gradient(data):
    trainer = Trainer(SMALL, data)
    trainer.reset(0)
    phase = trainer.phases[0]
    x, y = trainer.load(phase)
    twin = Net(SMALL)
    twin.load_state_dict(trainer.net.state_dict())
    twin.train()
    twin.edged = trainer.net.has_edge(phase.size - 1)
    assert twin.edged
    logits = twin(x)
    torch.nn.functional.cross_entropy(logits, y, reduction="sum").backward()
    found = {}
    for number, muon in enumerate(trainer.muons):
        muon.step = lambda m=muon, n=number: found.update({n: [p.grad.clone() for p in m.parameters]})
    trainer.sgd.step = lambda: found.update(biases=[p.grad.clone() for p in trainer.net.biases])
    trainer.net.train()
    trainer.step((x, y), phase, False)
    filters = [g for n in range(3) for g in found[n]]
    for got, p in zip((*filters, *found["biases"]), (*twin.filters, *twin.biases), strict=True):
        assert torch.allclose(got, p.grad, rtol=1e-4, atol=1e-6 + 1e-5 * p.grad.abs().max().item())


@pytest.mark.parametrize("size", [15, 14, 12])
@pytest.mark.parametrize("training", [True, False])
def test_a_network_whose_layers_pad_for_the_next_is_the_same(size, training):
    """Sizes of odd and of even layers; results, statistics and gradients."""
    found = []
    for edges in (False, True):
        torch.manual_seed(0)
        net = Net(replace(SMALL, edges=edges))
        net.reset()
        net.train(training)
        x = torch.randn(4, 32, size, size)
        y = net(x)
        y.square().sum().backward()
        found.append([y.detach(), net.means, net.variances, *(p.grad for p in net.parameters())])
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5 * a.abs().max().item())


def test_each_step_sees_the_next_part_of_the_order(data):
    trainer = Trainer(SMALL, data)
    trainer.reset(3)
    phase = trainer.phases[0]
    assert torch.equal(trainer.order[:48].sort().values, torch.arange(48))
    seen = [trainer.load(phase)[1].argmax(1) for _ in range(6)]
    assert torch.equal(torch.cat(seen), data[1][trainer.order[:48]])


def test_whitening_whitens(data):
    trainer = Trainer(SMALL, data)
    trainer.reset(0)
    x = (data[0].permute(0, 3, 1, 2).float() / 255 - torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)) / (
        torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)
    )
    made = torch.nn.functional.conv2d(x, trainer.net.whiten[:12]).permute(1, 0, 2, 3).flatten(1)
    assert torch.allclose(made @ made.T / made.shape[1], torch.eye(12), atol=0.01)


@pytest.mark.skipif(not runs_on(DEVICE), reason="Triton runs no programs here")
@pytest.mark.parametrize(("dtype", "bound"), BOUNDS.items())
@pytest.mark.parametrize("shape", [(37, 64, 3, 3), (16, 32, 2, 2), (5, 16, 4, 4)])
def test_the_end_in_one_kernel_has_the_gradients_of_its_parts(shape, dtype, bound):
    n, channels, *_ = shape
    g = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=g).to(dtype).contiguous(memory_format=torch.channels_last)
    head = (3 * torch.randn(10, channels, generator=g)).to(dtype)
    y = torch.rand(n, 10, generator=g).softmax(1)
    given = [t.to(DEVICE) for t in (x, head, y)]
    assert end_takes(*given[:2])
    dx, slopes, largest = (t.cpu() for t in end_and_back(*given))
    own, weights = x.double().requires_grad_(), head.double().requires_grad_()
    logits = torch.nn.functional.max_pool2d(own, shape[2:]).flatten(1) @ weights.T / channels
    torch.nn.functional.cross_entropy(logits, y.double(), reduction="sum").backward()
    assert (dx.double() - own.grad).norm() < bound * own.grad.norm()
    found = slopes[:, :10].double().T @ largest.double() / channels
    assert (found - weights.grad).norm() < bound * weights.grad.norm()


@pytest.mark.skipif(not runs_on(DEVICE), reason="Triton runs no programs here")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, over what is no number
@pytest.mark.parametrize("place", [0, 1, 3])
def test_the_end_in_one_kernel_sees_what_is_no_number(place):
    x = torch.randn(3, 16, 2, 2, generator=torch.Generator().manual_seed(0)).half()
    x[1, 5].view(-1)[place] = float("nan")
    x, head, y = (t.to(DEVICE) for t in (x, torch.ones(10, 16).half(), torch.full((3, 10), 0.1)))
    dx, slopes, largest = end_and_back(x.contiguous(memory_format=torch.channels_last), head, y)
    assert torch.equal(largest.isnan(), torch.nn.functional.max_pool2d(x, 2).flatten(1).isnan())
    assert slopes[:, :10].isnan().all(1).tolist() == [False, True, False]
    assert dx[1].isnan().any()
