"""A user's kernel: taken where it agrees with its twin, refused with the reason where it does not."""

import pytest
import torch

from hotloop.errors import KernelError
from hotloop.kernels import register


def twin(x: torch.Tensor, w: torch.Tensor, shift: float) -> torch.Tensor:
    return torch.relu(x) * w + shift


def good(x: torch.Tensor, w: torch.Tensor, shift: float) -> torch.Tensor:
    return (x.clamp_min(0).float() * w.float() + shift).to(x.dtype)


def inputs(size, dtype, device):
    x = torch.randn(5, size, device=device).to(dtype)
    return x, torch.randn(size, device=device).to(dtype), 0.5


def options(**more):
    return {"twin": twin, "inputs": inputs, "device_types": ("cpu",), "sizes": (1, 3, 64), **more}


def test_a_good_kernel_becomes_an_operator():
    kernel = register(good, **options(name="taken"))
    # three sizes, dense, strided and not aligned, two types
    assert kernel.checks == 18
    assert max(kernel.errors.values()) < 1e-2
    assert kernel.repeatable
    assert kernel.capture_safe is None
    assert "taken on cpu: 18 checks" in str(kernel)
    x, w, _ = inputs(7, torch.float32, "cpu")
    assert torch.equal(kernel(x, w, 0.5), good(x, w, 0.5))
    torch.library.opcheck(torch.ops.hotloop_user.taken.default, (x.requires_grad_(), w.requires_grad_(), 0.5))


def test_gradients_come_from_the_twin():
    kernel = register(good, **options(name="twin_gradients"))
    x, w, _ = inputs(7, torch.float32, "cpu")
    x.requires_grad_(), w.requires_grad_()
    ours = torch.autograd.grad(kernel(x, w, 0.5).square().sum(), [x, w])
    exact = torch.autograd.grad(twin(x, w, 0.5).square().sum(), [x, w])
    torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-5)


def test_a_given_backward_is_used_and_checked():
    calls = []

    def backward(slope, x, w, shift):
        calls.append(1)
        return slope * w * (x > 0), (slope * torch.relu(x)).sum(0), None

    kernel = register(good, **options(name="own_backward", backward=backward))
    assert max(kernel.gradient_errors.values()) < 2e-2
    before = len(calls)
    x, w, _ = inputs(7, torch.float32, "cpu")
    kernel(x.requires_grad_(), w, 0.5).sum().backward()
    assert len(calls) == before + 1
    assert torch.allclose(x.grad, w * (x > 0))

    def wrong(slope, x, w, shift):
        return slope * w, (slope * torch.relu(x)).sum(0), None

    with pytest.raises(KernelError, match="the gradient of argument 0 is"):
        register(good, **options(name="wrong_backward", backward=wrong))

    def forgotten(slope, x, w, shift):
        return slope * w * (x > 0), None, None

    with pytest.raises(KernelError, match="backward returns None for argument 1, whose gradient is not zero"):
        register(good, **options(name="forgotten_gradient", backward=forgotten))


def test_values_that_differ_are_refused_with_the_place():
    def off_at_the_end(x: torch.Tensor, w: torch.Tensor, shift: float) -> torch.Tensor:
        out = good(x, w, shift)
        if x.shape[1] % 2:
            out[-1, -1] += 1
        return out

    with pytest.raises(KernelError, match=r"off_at_the_end\(size 3, float32\).* most at flat index 14"):
        register(off_at_the_end, **options(sizes=(2, 3)))


def test_strided_inputs_read_as_dense_are_refused():
    def dense_only(x: torch.Tensor, w: torch.Tensor, shift: float) -> torch.Tensor:
        return good(torch.as_strided(x, x.shape, (x.shape[1], 1)), w, shift)

    with pytest.raises(KernelError, match="strided"):
        register(dense_only, **options())


def test_unwritten_elements_are_refused():
    def forgets(x: torch.Tensor, w: torch.Tensor, shift: float) -> torch.Tensor:
        out = torch.empty_like(x)
        out[:4] = good(x[:4], w, shift)
        return out

    with pytest.raises(KernelError, match=r"NaN at \(4, 0\)"):
        register(forgets, **options())


def test_a_kernel_that_changes_its_input_or_returns_another_type_is_refused():
    def changes(x: torch.Tensor, w: torch.Tensor, shift: float) -> torch.Tensor:
        out = good(x, w, shift)
        x.zero_()
        return out

    def widens(x: torch.Tensor, w: torch.Tensor, shift: float) -> torch.Tensor:
        return good(x, w, shift).double()

    with pytest.raises(KernelError, match="changes its argument 0"):
        register(changes, **options())
    with pytest.raises(KernelError, match="float64"):
        register(widens, **options())


def test_a_failing_kernel_and_missing_annotations_are_named():
    def fails(x: torch.Tensor, w: torch.Tensor, shift: float) -> torch.Tensor:
        raise RuntimeError("no such image")

    with pytest.raises(KernelError, match="RuntimeError: no such image"):
        register(fails, **options())
    with pytest.raises(KernelError, match="Annotate arguments"):
        register(lambda x: x, twin=lambda x: x, inputs=inputs, name="bare")


def test_inputs_as_a_list_are_redrawn():
    kernel = register(
        good,
        twin=twin,
        inputs=[(torch.zeros(4, 9), torch.zeros(9), 1.0)],
        device_types=("cpu",),
        name="listed",
        dtypes=(torch.float32,),
    )
    assert kernel.checks == 3
    assert kernel.errors[torch.float32] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without the kernel's device")
def test_elsewhere_the_twin_runs():
    def never(x: torch.Tensor, w: torch.Tensor, shift: float) -> torch.Tensor:
        raise AssertionError

    kernel = register(never, **options(name="elsewhere", device_types=("cuda",)))
    x, w, _ = inputs(7, torch.float32, "cpu")
    assert torch.equal(kernel(x, w, 0.5), twin(x, w, 0.5))
    assert "not checked" in str(kernel)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"inputs": []}, "nothing to check it with"),
        ({"inputs": None}, "nothing to check it with"),
        ({"sizes": ()}, "nothing to check it with"),
        ({"dtypes": ()}, "nothing to check it with"),
        ({"dtypes": (torch.float8_e4m3fn,)}, "for torch.float8_e4m3fn give the largest relative error"),
        ({"device_types": ("gpu",)}, "'gpu' is no type of device"),
    ],
)
def test_what_would_check_nothing_is_refused(given, said):
    with pytest.raises(KernelError, match=said):
        register(good, **options(name="unchecked", **given))


def test_one_type_of_device_by_its_name():
    kernel = register(good, **options(name="one_device", device_types="cpu"))
    assert kernel.device == torch.device("cpu")
    assert kernel.checks == 18


def test_a_name_that_is_taken_stays_with_the_kernel_that_has_it():
    def make(factor):
        def times(x: torch.Tensor) -> torch.Tensor:
            return x * factor

        return register(
            times, twin=times, inputs=[(torch.ones(3),)], device_types="cpu", dtypes=(torch.float32,)
        )

    two, three = make(2.0), make(3.0)
    assert (two.name, three.name) == ("times", "times_2")
    for kernel, factor in ((two, 2.0), (three, 3.0)):
        x = torch.ones(3, requires_grad=True)
        y = kernel(x)
        y.sum().backward()
        assert y.tolist() == x.grad.tolist() == [factor] * 3
    # the operator of its gradients has a name too
    register(good, **options(name="own"))
    other = register(good, **options(name="own_backward"))
    assert other.name != "own_backward"


@pytest.mark.parametrize("name", ["class", "größe", "a b", ""])
def test_what_is_no_name_for_an_operator_is_an_error(name):
    def nameless(x: torch.Tensor, w: torch.Tensor, shift: float) -> torch.Tensor:
        return good(x, w, shift)

    nameless.__name__ = name
    with pytest.raises(KernelError, match="no name for an operator"):
        register(nameless, **options())


def test_results_are_memory_of_their_own():
    def parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = x * 2
        return x[..., 1:], y, y

    kernel = register(parts, twin=parts, inputs=[(torch.ones(3, 4),)], device_types="cpu")
    x = torch.randn(3, 4)
    results = kernel(x)
    assert torch.equal(results[0], x[..., 1:])
    assert torch.equal(results[1], x * 2)
    assert torch.equal(results[2], x * 2)
    assert len({r.untyped_storage().data_ptr() for r in (x, *results)}) == 4


def test_arguments_by_name():
    kernel = register(good, **options(name="by_name"))
    x, w, _ = inputs(7, torch.float32, "cpu")
    assert torch.equal(kernel(x, shift=0.5, w=w), good(x, w, 0.5))


def test_a_backward_gets_dense_slopes_and_leaves_them_alone():
    seen = []

    def backward(slope, x, w, shift):
        seen.append(slope.is_contiguous())
        return slope * w * (x > 0), (slope * torch.relu(x)).sum(0), None

    kernel = register(good, **options(name="dense_slopes", backward=backward))
    x, w, _ = inputs(7, torch.float32, "cpu")
    kernel(x.requires_grad_(), w.requires_grad_(), 0.5).sum().backward()
    assert all(seen)

    def greedy(slope, x, w, shift):
        return slope.mul_(w * (x > 0)), None, None

    with pytest.raises(KernelError, match="backward changes its argument 0"):
        register(good, **options(name="greedy", backward=greedy))

    def failing(slope, x, w, shift):
        raise ValueError("too large")

    with pytest.raises(KernelError, match="backward failed: ValueError: too large"):
        register(good, **options(name="failing", backward=failing))
