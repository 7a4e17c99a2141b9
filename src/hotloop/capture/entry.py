"""One recording of a step: for one shape of its arguments, in one state of everything frozen."""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_unflatten

from hotloop.capture.arguments import Opened
from hotloop.capture.graphs import Recording
from hotloop.capture.identities import SCALARS
from hotloop.capture.ports import Port, can_be_port
from hotloop.nested import memory_of
from hotloop.state import Landing

__all__ = ["Entry", "describe", "only_objects", "only_tensors"]

_GRADIENT = operator.attrgetter("grad")
# One launch copies many small tensors; for one of more elements than this it uses a few blocks of the device only, and
# took 8.4 microseconds for 1 MB on an H200 where a copy of its own takes 2.
_LARGE = 65536


class Entry:
    """A recording and what belongs to it.

    Attributes:
        key: what it is for.
        compiled: forwards are compiled in it.
        warm: real steps run eagerly before it was recorded.
        used: when it was used last, as a number that grows.
        recording: None until it is recorded.
        inputs: tensors that the recording reads.
        written: numbers of those that it writes, too.
        outputs: leaves of what the step returned; tensors among them are written by each replay.
        around: makes what the step returned of other leaves; `single`: it is one tensor.
        effects: what the host does after each replay.
        ports: for each input, what says where the next replay reads it, None if it is copied beside the recording; an
            empty list for a recording without ports.
        landings: counters that the recording sends to the host.
        parameters: those that may have gradients.
        before: for each, the gradient that a replay adds to; None where it makes it anew.
        gradients: for each, the gradient after a replay; None if the step leaves and finds none at all.
        held: arguments that are no tensors and are known by their identity.
        refused: why it runs eagerly though others are recorded; None if it does not.
    """

    def __init__(self, key: Any, *, compiled: bool = False) -> None:
        self.key = key
        self.compiled = compiled
        self.warm = 0
        self.used = 0
        self.refused: str | None = None
        self.held: list[Any] = []
        self._guard: Any = None
        # arguments that are the same tensor as an earlier one, with its number; and the numbers of all others
        self._again: list[tuple[int, int]] = []
        self._kept: list[int] = []
        self.forget()

    def forget(self) -> None:
        """Give up the recording; the entry is recorded anew when it is used next."""
        self.recording: Recording | None = None
        self.inputs: list[torch.Tensor] = []
        self.written: list[int] = []
        self.outputs: list[Any] = []
        self.around: Callable[[list[Any]], Any] = list
        self.single = False
        self.effects: list[Callable[[], None]] = []
        self.ports: list[Port | None] = []
        self.landings: list[Landing] = []
        self._versions: list[int] = []
        self._addresses: set[int] = set()
        # memory of inputs that results lie in, too: whoever gets those may give it back
        self._lent: set[int | None] = set()
        self._aside: list[torch.Tensor] = []
        self.parameters: list[torch.Tensor] = []
        self.before: list[torch.Tensor | None] = []
        self.gradients: list[torch.Tensor | None] | None = None
        self._together: list[int] | None = None
        self._apart: list[int] = []

    def take_inputs(self, leaves: list[Any]) -> list[Any]:
        """`leaves` with tensors of the recording's own in place of those given, which it reads from for ever."""
        taken = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.inputs = only_tensors(taken)
        return taken

    def watch_inputs(self) -> None:
        """The step begins: see which of the inputs it writes."""
        self._versions = list(map(_version, self.inputs))

    def feeds(self, leaves: list[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The copies (from, to) of inputs that the recording can make itself."""
        return [pair for pair in zip(only_tensors(leaves), self.inputs, strict=True) if can_be_port(*pair)]

    def settle_gradients(self) -> None:
        """Gradients made anew where others lay go to where those lay: the next replay looks for them there."""
        moved = [
            (place, p, gradient)
            for place, p in zip(self.before, self.parameters, strict=True)
            if place is not None and (gradient := p.grad) is not None and gradient is not place
        ]
        if moved:
            torch._foreach_copy_([m[0] for m in moved], [m[2] for m in moved])
            for place, p, _ in moved:
                p.grad = place

    def keep(self, result: Any, effects: list[Callable[[], None]]) -> None:
        """What the recorded step returned, and what it leaves to the host after each replay."""
        opened = Opened(result)
        self.outputs = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in opened.leaves]
        self.around = functools.partial(tree_unflatten, treespec=opened.spec)
        if opened.objects:
            # objects that hold what was differentiated would keep all that its graph holds
            self.around = functools.partial(Opened(opened.around(self.outputs)).around, anew=True)
        self.single = isinstance(result, torch.Tensor)
        self.effects = effects
        results = only_tensors(self.outputs)
        self._lent = (set(map(memory_of, self.inputs)) & set(map(memory_of, results))) - {None}
        versions = enumerate(zip(self.inputs, self._versions, strict=True))
        self.written = [i for i, (place, version) in versions if _version(place) != version]
        after = [p.grad for p in self.parameters]
        if any(g is not None for g in (*after, *self.before)):
            self.gradients = after

    def open_ports(self, feeds: Sequence[tuple[torch.Tensor, torch.Tensor]], landings: list[Landing]) -> None:
        """The recording reads inputs and sends counters by itself: `feeds` are the copies (from, to) recorded first.

        Raises:
            PortError: one of the copies is not found in the recording.
        """
        recording = self.recording
        assert recording is not None
        ports = {id(place): recording.port(source, place, "src") for source, place in feeds}
        for landing in landings:
            landing.aim = recording.port(landing.counts, landing.spare, "dst")
        self.ports = [ports.get(id(place)) for place in self.inputs]
        self._addresses = {place.data_ptr() for place in self.inputs if id(place) in ports}
        self.landings = landings

    def expect(self, arguments: Sequence[torch.Tensor]) -> None:
        """From now on `takes` says whether arguments are like these."""
        if self._guard is not None:
            return
        # torch's check takes no tensor twice, as in `train(x, x)`
        first = {id(argument): i for i, argument in reversed(list(enumerate(arguments)))}
        again = [(i, first[id(argument)]) for i, argument in enumerate(arguments) if first[id(argument)] != i]
        kept = [i for i, argument in enumerate(arguments) if first[id(argument)] == i]
        try:
            from torch._C._dynamo.guards import TensorGuards

            once = [arguments[i] for i in kept]
            guard = TensorGuards(*once, dynamic_dims_sizes=None, dynamic_dims_strides=None)
            self._guard = guard if guard.check(*once) else None
            self._again, self._kept = again, kept
        except (ImportError, TypeError, RuntimeError):
            # torch's own check in C is private to it: without it every call goes the general way
            self._guard = None

    def takes(self, arguments: tuple[Any, ...]) -> bool:
        """Whether `arguments` are tensors like those expected: shape, stride, dtype, device, in one call."""
        if self._guard is None:
            return False
        if self._again:
            if len(arguments) != len(self._kept) + len(self._again):
                return False
            if not all(arguments[i] is arguments[j] for i, j in self._again):
                return False
            arguments = tuple(arguments[i] for i in self._kept)
        try:
            return bool(self._guard.check(*arguments))
        except TypeError:
            return False

    def copy_in(self, tensors: Sequence[torch.Tensor]) -> None:
        """Put `tensors` where the recording reads, or have it read them; those that lie there already stay.

        Raises:
            PortError: it cannot be had to read one of them.
        """
        inputs = self.inputs
        self._aside.clear()
        if self._lent:
            # one copied in may be where another is read
            tensors = [t.clone() if memory_of(t) in self._lent else t for t in tensors]
            self._aside.extend(tensors)
        if self.ports:
            for port, place, tensor in zip(self.ports, inputs, tensors, strict=True):
                if port is not None:
                    address = tensor.data_ptr()
                    if address in self._addresses:
                        # what a copy of memory onto itself does, nobody promises
                        self._aside.append(aside := tensor.clone())
                        address = aside.data_ptr()
                    port(address)
                elif tensor is not place:
                    place.copy_(tensor, non_blocking=True)
            return
        if all(map(operator.is_, tensors, inputs)):
            return
        if self._together is None:
            self._together = [i for i, place in enumerate(inputs) if place.numel() <= _LARGE]
            self._apart = [i for i, place in enumerate(inputs) if place.numel() > _LARGE]
            if len(self._together) == 1:
                self._apart, self._together = list(range(len(inputs))), []
        for i in self._apart:
            inputs[i].copy_(tensors[i], non_blocking=True)
        if self._together:
            places, values = [inputs[i] for i in self._together], [tensors[i] for i in self._together]
            torch._foreach_copy_(places, values, non_blocking=True)

    def does_as_given(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether a replay does to `tensors` what the step does: not if it writes some, and several are one memory."""
        return not self.written or len(set(map(memory_of, tensors))) == len(tensors)

    def written_of(self, tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Arguments that the step writes, each with what a replay writes in its place; padded ones are copies."""
        pairs = [(tensors[i], self.inputs[i]) for i in self.written if i < len(tensors)]
        return [(tensor, place) for tensor, place in pairs if tensor.shape == place.shape]

    def copy_out(self, tensors: Sequence[torch.Tensor]) -> None:
        """After a replay: arguments that the step writes are what it made of them."""
        with torch.no_grad():
            for tensor, place in self.written_of(tensors):
                if tensor.data_ptr() != place.data_ptr():
                    tensor.copy_(place, non_blocking=True)

    def bring_gradients(self) -> bool:
        """Gradients that wait lie where the recording adds to them; False if it does not expect one of them."""
        if all(map(operator.is_, map(_GRADIENT, self.parameters), self.before)):
            return True
        pairs = [
            (p, place) for p, place in zip(self.parameters, self.before, strict=True) if p.grad is not place
        ]
        if any(place is None for _, place in pairs):
            return False
        moved = [(place, p.grad) for p, place in pairs if p.grad is not None and place is not None]
        for p, place in pairs:
            if p.grad is None and place is not None:
                place.zero_()
            p.grad = place
        if moved:
            torch._foreach_copy_([m[0] for m in moved], [m[1] for m in moved])
        return True

    def leave_gradients(self) -> None:
        """Let each parameter's gradient be what it was before the recording, whose own has not been computed."""
        for p, gradient in zip(self.parameters, self.before, strict=True):
            p.grad = gradient

    def place_gradients(self) -> None:
        """Let each parameter's gradient be the tensor that the last replay wrote."""
        gradients = self.gradients
        if gradients is None or all(map(operator.is_, map(_GRADIENT, self.parameters), gradients)):
            return
        for p, gradient in zip(self.parameters, gradients, strict=True):
            if p.grad is not gradient:
                p.grad = gradient


def describe(leaf: Any) -> Any:
    """What of an argument a recording is for: a tensor's shape, type, stride, dtype and so on; anything else itself."""
    if isinstance(leaf, torch.Tensor):
        kind = (leaf.shape, type(leaf), leaf.dtype, leaf.device, leaf.requires_grad)
        if leaf.layout is not torch.strided:
            return (*kind, leaf.layout)
        # the same memory says something else where it is to be conjugated or negated on reading
        return (*kind, leaf.stride(), leaf.is_conj(), leaf.is_neg())
    if not isinstance(leaf, SCALARS):
        return id(leaf)
    if isinstance(leaf, float | complex) and not (leaf and isinstance(leaf, float)):
        # the sign of a zero is seen in its text alone
        return (type(leaf), repr(leaf))
    # 1, 1.0 and True are equal, and not the same to an operation
    return (type(leaf), leaf)


def only_tensors(leaves: list[Any]) -> list[torch.Tensor]:
    """The tensors among flattened arguments or results, in order."""
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def only_objects(leaves: list[Any]) -> list[Any]:
    """What is neither a tensor nor known by its value or its name, in order."""
    plain = (torch.Tensor, enum.Enum, type, *SCALARS)
    return [leaf for leaf in leaves if not isinstance(leaf, plain)]


def _version(tensor: torch.Tensor) -> int:
    """How often it was written; 0 for a tensor of inference mode, which does not count that."""
    return 0 if tensor.is_inference() else tensor._version
