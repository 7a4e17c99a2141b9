"""What `prepare` does to each kind of object."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from hotloop.data import Loader
from hotloop.errors import PrepareError
from hotloop.hardware.processes import Processes
from hotloop.loop.buffers import BufferKeeper
from hotloop.loop.host_updates import HostUpdates
from hotloop.loop.machine import MachineUse
from hotloop.loop.modules import Binding, bind_module, binding_of, unbind_module
from hotloop.loop.prepared import map_objects
from hotloop.loop.resident_updates import ResidentUpdates
from hotloop.loop.resume import Registry
from hotloop.loop.schedulers import HostSchedule, ResidentSchedule, bind_scheduler
from hotloop.loop.updates import updates_of
from hotloop.loop.window import Window
from hotloop.optim import prefer_fused
from hotloop.parallel import collectives
from hotloop.parallel.plan import Plan
from hotloop.parallel.replica import make_replica
from hotloop.precision import Precision
from hotloop.state import HostState, ResidentState

if TYPE_CHECKING:
    from hotloop.precision import Float8Layers

__all__ = ["Preparer"]


class Preparer:
    """Binds modules, optimizers, schedulers and loaders to one loop.

    Attributes:
        registry: everything prepared, in order.
        updates: the updates of each prepared optimizer, in order.
        keepers: those of the modules that have buffers to protect.
        replicated: the bindings of the modules whose gradients are exchanged between processes.
        float8: of each prepared module, which of its layers compute in fp8; with precision "fp8" alone.
        expected_feed: which of the loaders fed training in the run that was resumed; -1 if unknown.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        processes: Processes,
        precision: Precision,
        plan: Plan,
        window: Window,
        state: HostState | ResidentState,
        seed: int | None,
        use: MachineUse,
        say: Callable[[str], None],
        after_update: Callable[[Any], None],
        before_batch: Callable[[Any], None],
    ) -> None:
        self.registry = Registry()
        self.updates: list[HostUpdates | ResidentUpdates] = []
        self.keepers: list[BufferKeeper] = []
        self.replicated: list[Binding] = []
        self.float8: list[Float8Layers] = []
        self.expected_feed = -1
        self.schedules: dict[int, HostSchedule | ResidentSchedule] = {}
        self._device = device
        self._processes = processes
        self._precision = precision
        self.plan = plan
        self._window = window
        self._state = state
        self._seed = seed
        self._use = use
        self._say = say
        self._after_update = after_update
        self._before_batch = before_batch

    def prepare(self, objects: tuple[Any, ...]) -> Any:
        """See `Loop.prepare`. Modules first, then optimizers, schedulers, loaders, wherever they stand."""
        results: Any = objects
        every = self._use.window_of(objects, self._window.every)
        if every is not None:
            self._window.every = every
            # a batch that is all of an update needs no weight against others
            self._window.weighted = self._window.weighted and (every > 1 or self._processes.world > 1)
        for kind, act in (
            ("module", self._module),
            ("optimizer", self._optimizer),
            ("scheduler", self._scheduler),
            ("loader", self._loader),
        ):
            # what was a list of batches is a Loader after the last round, so kinds are asked anew in each
            results = tuple(
                map_objects(thing, kind, act, f"argument {i + 1}") for i, thing in enumerate(results)
            )
        return results[0] if len(objects) == 1 else results

    def _module(self, module: nn.Module) -> nn.Module:
        binding = binding_of(module)
        if binding is not None:
            if binding.window is self._window:
                return module
            unbind_module(module)
            _make_plain(module)
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise PrepareError("prepare takes the plain module, not one wrapped in DistributedDataParallel")
        if any(module is known for known in self.registry.modules):
            return module
        module.to(self._device)
        self._use.lay_out(module, self._say)
        if self._precision.name == "fp8":
            self._compute_in_float8(module)
        if self._precision.stores_16_bits:
            self._store_in_bf16(module)
        keeper = None
        if (self._state.watching or self._processes.world > 1) and next(module.buffers(), None) is not None:
            keeper = BufferKeeper(module)
            self.keepers.append(keeper)
        replica = make_replica(module, self._device, self._processes, self.plan)
        if replica is None and self._processes.world > 1:
            # nothing in it learns, but all ranks are to have the same all the same
            collectives.broadcast(list(module.state_dict().values()), self._processes)
        binding = Binding(module, self._window, self._device, self._precision.autocast, replica, keeper)
        if replica is not None:
            self.replicated.append(binding)
        if binding.needed:
            bind_module(module, binding)
        self.registry.modules.append(module)
        return module

    def _store_in_bf16(self, module: nn.Module) -> None:
        from hotloop.precision.weights import store_in_bf16

        several = self._processes.world > 1
        if several:
            # rank 0's values, before they are rounded: masters of all ranks are to begin alike
            collectives.broadcast([p.data for p in module.parameters()], self._processes)
        # data parallelism sums gradients in the dtype of the parameters
        wide = not self._window.plain and not several and hasattr(torch.Tensor, "grad_dtype")
        stored = store_in_bf16(module, masters=self._precision.master == "fp32", wide_gradients=wide)
        self._say(f"{type(module).__name__}: {stored}")
        for optimizer in self.registry.optimizers:
            self._give_masters(optimizer)

    def _give_masters(self, optimizer: Any) -> None:
        """Let `optimizer` keep masters of its parameters that are stored in bf16, whichever was prepared first."""
        if not self._precision.stores_16_bits:
            return
        if self._precision.master != "fp32":
            for group in optimizer.param_groups:
                if group.get("master", False) is None:
                    # hotloop's optimizers keep masters unless they are told not to
                    group["master"] = False
            return
        from hotloop.optim import add_masters
        from hotloop.precision.weights import needs_masters, take_originals

        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if needs_masters(parameters):
            add_masters(optimizer, take_originals(parameters))

    def _compute_in_float8(self, module: nn.Module) -> None:
        from hotloop.precision import install_float8

        layers = install_float8(module, self._precision)
        self.float8.append(layers)
        self._say(f"{type(module).__name__}: {layers}")

    def _optimizer(self, optimizer: Any) -> Any:
        known = updates_of(optimizer)
        if known is not None:
            if known in self.updates:
                return optimizer
            known.remove()
        self._check_parameters(optimizer)
        self._say_if_foreign(optimizer)
        self._use.fuse(optimizer, self._say)
        self._give_masters(optimizer)
        updates: HostUpdates | ResidentUpdates
        if isinstance(self._state, ResidentState):
            if prefer_fused(optimizer):
                self._say(f"{type(optimizer).__name__} runs fused: it left the implementation to torch")
            updates = ResidentUpdates(optimizer, self._window, self.keepers, self._state, self._after_update)
            self._say_route(optimizer, updates.route)
        else:
            updates = HostUpdates(optimizer, self._window, self.keepers, self._state, self._after_update)
        updates.install()
        self.updates.append(updates)
        self.registry.optimizers.append(optimizer)
        if any(getattr(s, "optimizer", None) is optimizer for s in self.registry.schedulers):
            self._bind_schedulers(optimizer)
        return optimizer

    def _check_parameters(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.device != self._device and p.device.type != "meta":
                    raise PrepareError(
                        f"{type(optimizer).__name__} holds a parameter of shape {tuple(p.shape)} on {p.device}, but "
                        f"this loop runs on {self._device}: prepare its module in the same call or before"
                    )

    def _say_if_foreign(self, optimizer: Any) -> None:
        mine = {id(p) for module in self.registry.modules for p in module.parameters()}
        if not any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            self._say(
                f"{type(optimizer).__name__} updates no parameter of a prepared module: what it updates is not "
                "computed in the loop's precision, nor saved"
            )

    def _say_route(self, optimizer: Any, route: str) -> None:
        name = type(optimizer).__name__
        if route == "masked":
            self._say(
                f"{name} is kept from non-finite updates by a copy of its parameters and state each step"
            )
        elif route == "none" and self._state.nonfinite == "stop":
            self._say(
                f"{name} cannot be stopped on the device: weights may be up to 8 updates past a non-finite one"
            )

    def _scheduler(self, scheduler: Any) -> Any:
        if id(scheduler) not in self.schedules:
            self.registry.schedulers.append(scheduler)
            self._bind_schedulers(getattr(scheduler, "optimizer", None))
        return scheduler

    def _bind_schedulers(self, optimizer: Any) -> None:
        """Bind all schedulers of `optimizer`, whichever of them and it came first."""
        updates = updates_of(optimizer)
        mine = [s for s in self.registry.schedulers if getattr(s, "optimizer", None) is optimizer]
        for scheduler in mine:
            self.schedules[id(scheduler)] = bind_scheduler(
                scheduler, updates, self._window, alone=len(mine) == 1
            )
        if len(mine) > 1 and isinstance(updates, ResidentUpdates):
            self._say(
                f"{type(optimizer).__name__} has {len(mine)} schedulers: they are stepped on the host, where it is not "
                "known in time which updates were refused"
            )

    def _loader(self, source: Any) -> Loader:
        if isinstance(source, Loader):
            if any(source is known for known in self.registry.loaders):
                return source
            source = source.source
        serving = self._use.serving_of(first=not self.registry.loaders)
        loader = Loader(
            source, device=self._device, processes=self._processes, seed=self._seed, serving=serving
        )
        if loader.unserved:
            self._say(loader.unserved)
        if isinstance(source, Dataset) and not isinstance(source, IterableDataset):
            self._say(
                f"{type(source).__name__} is no DataLoader: each of its items is taken for a batch, in their order"
            )
        self._say_if_empty(loader)
        loader.before_batch = functools.partial(self._before_batch, loader)
        self._window.watch(loader)
        self.registry.loaders.append(loader)
        return loader

    def _say_if_empty(self, loader: Loader) -> None:
        try:
            steps = len(loader)
        except (TypeError, NotImplementedError):  # a stream, which cannot tell
            return
        if steps:
            return
        dropped = getattr(loader.source, "drop_last", False)
        why = ": its samples are fewer than a batch, and drop_last=True leaves them out" if dropped else ""
        self._say(f"loader {len(self.registry.loaders) + 1} has no batches{why}")

    def updates_for(self, parameters: list[torch.Tensor]) -> HostUpdates | ResidentUpdates:
        """The updates of the first optimizer that holds one of `parameters`.

        Raises:
            PrepareError: no prepared optimizer does.
        """
        if len(self.updates) == 1:
            return self.updates[0]
        wanted = {id(p) for p in parameters}
        for updates in self.updates:
            if any(id(p) in wanted for p in updates.parameters()):
                return updates
        raise PrepareError(
            "clip_grad_norm_: no prepared optimizer updates these parameters; prepare it first"
        )

    def register(self, objects: tuple[Any, ...]) -> None:
        """See `Loop.register`."""
        for thing in objects:
            if not hasattr(thing, "state_dict") or not hasattr(thing, "load_state_dict"):
                raise PrepareError(f"register: {type(thing).__name__} has no state_dict and load_state_dict")
            if not any(thing is known for known in self.registry.registered):
                self.registry.registered.append(thing)

    def training_loader(self) -> Loader | None:
        """The loader that feeds training, as far as can be told."""
        if self._window.feed is not None:
            feed: Loader = self._window.feed
            return feed
        loaders = self.registry.loaders
        fed = [x for x in loaders if x.with_grad and x.handed_out]
        if not fed and 0 <= self.expected_feed < len(loaders):
            return loaders[self.expected_feed]
        return next((x for x in fed if x.live), fed[0] if fed else None)


def _make_plain(module: nn.Module) -> None:
    """Take back what another loop's precision did to `module`."""
    from hotloop.precision import remove_float8, restore_weights

    remove_float8(module)
    restore_weights(module)
