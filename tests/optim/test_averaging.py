"""Averaged weights against torch's AveragedModel and closed forms, and the model put back to the bit."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

import hotloop
from hotloop.optim import EMA, AdamW, AveragedWeights, add_masters, masters_of


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)).to(dtype)


def move(model, step):
    """Any change of weights and buffers that depends on the number of the step alone."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator).to(p.dtype), alpha=0.1)
    model(torch.randn(8, 4, generator=generator).to(next(model.parameters()).dtype))


def assert_same(a, b):
    for name, value in b.items():
        assert torch.equal(a[name], value), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("buffers", ["copy", "average"])
@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_it_is_torchs_averaged_model(kind, buffers, dtype):
    model = make_model(dtype)
    # torch's own equal weights cannot average a counter, and its exponential ones round it
    model[1].num_batches_tracked = None
    function = get_ema_multi_avg_fn(0.9) if kind == "ema" else get_swa_multi_avg_fn()
    theirs = AveragedModel(model, multi_avg_fn=function, use_buffers=buffers == "average")
    ours = EMA(model, 0.9, buffers=buffers) if kind == "ema" else AveragedWeights(model, buffers=buffers)
    for step in range(12):
        move(model, step)
        ours.update()
        theirs.update_parameters(model)
    assert ours.averaged == int(theirs.n_averaged) == 12
    expected, found = theirs.module.state_dict(), ours.model().state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if kind == "swa" and dtype == torch.float64:
            # torch divides an integer tensor by one: its 1 / n is a float32
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-7)
        else:
            assert torch.equal(found[name], value), name


def test_a_counter_of_batches_is_the_models():
    model = make_model()
    ema = EMA(model, 0.9, buffers="average")
    for step in range(3):
        move(model, step)
        ema.update()
    assert ema.model()[1].num_batches_tracked == 3


def test_equal_weights_give_the_mean():
    model = make_model(torch.float64)
    averages, seen = AveragedWeights(model), []
    for step in range(9):
        move(model, step)
        averages.update()
        seen.append(copy.deepcopy(model.state_dict()))
    for name, value in averages.averages.items():
        mean = torch.stack([state[name] for state in seen]).mean(0)
        torch.testing.assert_close(value, mean, rtol=1e-13, atol=1e-15)


def test_warm_up_by_its_formula():
    model = nn.Linear(1, 1, bias=False).double()
    ema = EMA(model, 0.75, warmup=True)
    expected = None
    for n in range(1, 60):
        nn.init.constant_(model.weight, float(n * n % 17))
        ema.update()
        decay = min(0.75, n / (n + 9))
        value = model.weight.item()
        expected = value if expected is None else decay * expected + (1 - decay) * value
        assert ema.averages["weight"].item() == pytest.approx(expected, rel=1e-12)


def test_every_so_many_calls():
    model = make_model()
    rare, often = EMA(model, 0.8, every=3), EMA(model, 0.8)
    for step in range(10):
        move(model, step)
        rare.update()
        if step % 3 == 0:
            often.update()
    assert rare.averaged == 4
    assert_same(rare.averages, often.averages)
    assert_same(rare.buffers, often.buffers)


def test_decay_can_be_changed_between_updates():
    model = nn.Linear(1, 1, bias=False)
    ema = EMA(model, 0.5)
    for value, decay in ((0.0, 0.5), (4.0, 0.75)):
        ema.decay = decay
        nn.init.constant_(model.weight, value)
        ema.update()
    assert ema.averages["weight"].item() == 1.0
    assert ema.decay == 0.75
    with pytest.raises(hotloop.HotloopError, match="must be in"):
        ema.decay = 1.0


@pytest.mark.parametrize("fails", [False, True])
def test_applied_is_undone_to_the_bit(fails):
    model = make_model()
    ema = EMA(model, 0.9)
    for step in range(5):
        move(model, step)
        ema.update()
    move(model, 7)
    before = copy.deepcopy(model.state_dict())
    addresses = [p.data_ptr() for p in model.parameters()]
    try:
        with ema.applied() as inside:
            assert inside is model
            assert_same(dict(model.named_parameters()), ema.averages)
            assert_same(dict(model.named_buffers()), ema.buffers)
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert_same(model.state_dict(), before)
    assert [p.data_ptr() for p in model.parameters()] == addresses


def test_model_is_an_independent_copy_and_others_can_be_given():
    model = make_model()
    ema = EMA(model)
    move(model, 1)
    ema.update()
    averaged = ema.model()
    assert not averaged.training
    assert model.training
    other = make_model()
    with ema.applied(other):
        assert_same(dict(other.named_parameters()), dict(averaged.named_parameters()))
    with pytest.raises(hotloop.HotloopError, match=r"Linear has no '0.bias'"):
        ema.copy_to(nn.Linear(2, 2))


@pytest.mark.parametrize("kind", [EMA, AveragedWeights])
def test_saved_and_put_back(kind, tmp_path):
    model, other = make_model(), make_model()
    ours, again = kind(model, every=2), kind(other, every=2)
    for step in range(5):
        move(model, step)
        ours.update()
    torch.save((model.state_dict(), ours.state_dict()), tmp_path / "x")
    weights, state = torch.load(tmp_path / "x", weights_only=True)
    other.load_state_dict(weights)
    places = [t.data_ptr() for t in again.averages.values()]
    again.load_state_dict(state)
    assert [t.data_ptr() for t in again.averages.values()] == places
    for step in range(5, 9):
        for m, a in ((model, ours), (other, again)):
            move(m, step)
            a.update()
    assert again.averaged == ours.averaged == 5
    assert_same(again.averages, ours.averages)
    with pytest.raises(hotloop.HotloopError, match=r"of another model than this: they differ in '0.bias'"):
        kind(nn.Linear(2, 2)).load_state_dict(state)


def test_sixteen_bit_weights_are_averaged_in_fp32_from_their_masters():
    model = make_model(torch.bfloat16)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    plain, precise = EMA(model, 0.5), EMA(model, 0.5, optimizer=optimizer)
    reference = {}
    for step in range(4):
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.1 * (step + 1))
        optimizer.step()
        plain.update()
        precise.update()
        for name, p in model.named_parameters():
            master = masters_of(optimizer).get(p)
            reference[name] = torch.lerp(reference[name], master, 0.5) if step else master.clone()
    assert all(a.dtype == torch.float32 for a in plain.averages.values())
    assert_same(precise.averages, reference)
    assert any(not torch.equal(plain.averages[n], precise.averages[n]) for n in reference)
    with plain.applied():
        assert model[0].weight.dtype == torch.bfloat16


@pytest.mark.parametrize("own", [True, False])
def test_applying_averages_costs_masters_no_precision(own):
    model = make_model(torch.bfloat16)
    make = AdamW if own else torch.optim.AdamW
    optimizer = add_masters(make(model.parameters(), lr=1e-3))
    ema = EMA(model, 0.5)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    ema.update()
    before = [m.clone() for m in masters_of(optimizer).tensors()]
    with ema.applied(), torch.no_grad():
        model[0].weight.zero_()
    optimizer.state_dict()
    assert all(torch.equal(a, b) for a, b in zip(masters_of(optimizer).tensors(), before, strict=True))


@pytest.mark.parametrize("nonfinite", ["skip", "ignore"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_in_a_loop_only_updates_that_were_made_are_averaged(accumulation, nonfinite):
    loop = hotloop.Loop(device="cpu", record=False, nonfinite=nonfinite, accumulation=accumulation)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [torch.full((1, 2), float(i)) for i in range(6)]
    model, optimizer, loader = loop.prepare(model, optimizer, data)
    ema = EMA(model, 0.5, optimizer=optimizer)
    expected, made = None, 0
    for i, x in enumerate(loader):
        bad = nonfinite == "skip" and i == 2
        loop.backward(model(x * float("nan") if bad else x * 0.1).square().mean())
        before = loop.updates - loop.skipped
        loop.update(optimizer)
        ema.update()
        if loop.updates - loop.skipped > before:
            made += 1
            weight = model.weight.detach()
            expected = weight.clone() if expected is None else torch.lerp(expected, weight, 0.5)
    loop.end_training()
    assert made == ema.averaged
    assert (
        made == {(1, "skip"): 5, (1, "ignore"): 6, (3, "skip"): 1, (3, "ignore"): 2}[accumulation, nonfinite]
    )
    assert torch.equal(ema.averages["weight"], expected)


def test_settings_out_of_range():
    model = make_model()
    with pytest.raises(hotloop.HotloopError, match="buffers='drop' is not known; valid: 'copy', 'average'"):
        EMA(model, buffers="drop")
    with pytest.raises(hotloop.HotloopError, match="every=0"):
        AveragedWeights(model, every=0)
    with pytest.raises(hotloop.HotloopError, match=r"every=1\.5 must be a whole"):
        EMA(model, every=1.5)
    with pytest.raises(hotloop.HotloopError, match="no 'averages'"):
        EMA(model).load_state_dict(model.state_dict())
    with pytest.raises(hotloop.HotloopError, match="ReLU has no parameters"):
        EMA(nn.ReLU())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda ema: pickle.loads(pickle.dumps(ema))])
def test_a_copy_counts_and_averages_by_itself(copied, tmp_path):
    model = make_model()
    ema = EMA(model, 0.9, every=2)
    move(model, 0)
    ema.update()
    other = copied(ema)
    for step in range(1, 6):
        move(model, step)
        ema.update()
    assert other.averaged == 1
    for step in range(1, 6):
        move(other._model, step)
        other.update()
    assert other.averaged == ema.averaged == 3
    assert_same(other.averages, ema.averages)
    assert torch.equal(other.state_dict()["counts"], torch.tensor([3.0, 6.0], dtype=torch.float64))


@pytest.mark.parametrize("kind", [EMA, AveragedWeights])
def test_weights_that_are_whole_numbers_are_the_newest(kind):
    model = nn.Linear(2, 2)
    model.codes = nn.Parameter(torch.arange(3), requires_grad=False)
    model.mask = nn.Parameter(torch.tensor([True, False]), requires_grad=False)
    averages = kind(model, every=2)
    for step in range(4):
        with torch.no_grad():
            model.codes.add_(1)
            model.mask.logical_not_()
        averages.update()
        # every second call: 0 and 2
        assert averages.averages["codes"].tolist() == [n + step // 2 * 2 + 1 for n in range(3)]
    assert averages.averages["mask"].tolist() == [False, True]


def test_complex_weights_are_averaged():
    model = nn.Module()
    model.w = nn.Parameter(torch.tensor([1.0 + 2.0j]))
    ema = EMA(model, 0.75)
    ema.update()
    model.w.data.mul_(5j)
    ema.update()
    assert ema.averages["w"].item() == pytest.approx(0.75 * (1 + 2j) + 0.25 * 5j * (1 + 2j))


@pytest.mark.parametrize("size", [1, 7])
def test_another_shape_is_told_and_not_spread(size):
    model = nn.Linear(2, 2)
    model.register_buffer("cache", torch.zeros(3))
    ema = EMA(model)
    ema.update()
    model.cache = torch.ones(size)
    for use in (ema.update, ema.copy_to):
        with pytest.raises(hotloop.HotloopError, match=rf"'cache' has shape \[{size}\]"):
            use()
    with pytest.raises(hotloop.HotloopError, match="'weight' has shape"):
        EMA(nn.Linear(1, 1)).copy_to(nn.Linear(2, 1))
