"""A training run in plain PyTorch whose data ranks are played by one process, each with what is its own."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import hashlib
from typing import TYPE_CHECKING, Any

import torch

from shard_core.testing.programs import operations as ops
from shard_core.testing.programs.model import Batch, Model, batch, parameters_of
from shard_core.testing.programs.parts import WRITING
from shard_core.testing.programs.parts.dropout import MASKS
from shard_core.testing.programs.plain.precisions import PlainPrecision, input_dtype
from shard_core.testing.programs.program import share_of
from shard_core.testing.programs.settings import TAKES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shard_core.testing.programs.program import OptimizerSpec, Program

Values = dict[str, Any]

_OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-6}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "eps": 1e-6}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.01, "eps": 1e-6, "amsgrad": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.005, "momentum": 0.5, "eps": 1e-3}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.02, "eps": 1e-6}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01, "eps": 1e-6}),
    "radam": (torch.optim.RAdam, {"lr": 0.01, "eps": 1e-6}),
    "adamax": (torch.optim.Adamax, {"lr": 0.01, "eps": 1e-6}),
    "asgd": (torch.optim.ASGD, {"lr": 0.05, "t0": 1}),
    "adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.02}),
    "muon": (torch.optim.Muon, {"lr": 0.002}),
}


@dataclasses.dataclass(kw_only=True)
class Count:
    """What denominators add up to for one optimizer, whether its gradients were divided by it, and whether they fit."""

    total: float = 0.0
    divided: bool = False
    fits: bool | None = None


class PlainRun:
    """Models, optimizers and schedulers, and each data rank's generator and buffers.

    Attributes:
        masks: What each data rank's dropout is to keep in the coming operation, where its device draws that by itself,
            and what it has kept in the last one.

    Args:
        program: Whose.
        ranks: How many data ranks.
        exchanges_buffers: By strategy name, whether rank 0's buffers are sent to all before each forward, as its
            card says.
    """

    def __init__(self, program: Program, ranks: int, exchanges_buffers: Mapping[str, bool]) -> None:
        self._program = program
        self._ranks = range(ranks)
        self._exchanges = exchanges_buffers
        self.masks = collections.defaultdict[int, list[torch.Tensor]](list)
        self._strategy = program.strategy
        self._saved: Any = None
        self._written: dict[int, dict[str, torch.Tensor]] = {}
        self._added: list[ops.AddGroup] = []
        self._build()

    def _build(self) -> None:
        self._precision = PlainPrecision(self._strategy, self._program.precision, self._program.models)
        self._seed(self._program.seed)
        torch.set_rng_state(self.generators[0])
        with torch.random.fork_rng(enabled=self._program.apart):
            if self._program.apart:
                torch.manual_seed(0)
            self.models = [Model(*spec.parts, output=spec.output) for spec in self._program.models]
        self.generators[0] = torch.get_rng_state()
        for model in self.models:
            self._precision.convert(model)
        self._untrained = [_frozen(model) for model in self.models]
        self.optimizers = [self._optimizer(spec) for spec in self._program.optimizers]
        self._schedulers = [
            torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9) if spec.scheduled else None
            for spec, optimizer in zip(self._program.optimizers, self.optimizers, strict=True)
        ]
        self._average = copy.deepcopy(self.models[0]) if self._program.averaged else None
        for operation in self._added:
            self._add_group(operation)
        self._counts = [Count() for _ in self.optimizers]
        self._buffers = [[_buffers(model) for model in self.models] for _ in self._ranks]
        self._sent: list[list[dict[str, torch.Tensor]]] = []

    def _optimizer(self, spec: OptimizerSpec) -> torch.optim.Optimizer:
        share = share_of(self._program, spec)
        groups = parameters_of(self.models[spec.module], spec.groups, share, spec.without)
        more: dict[str, Any] = {"weight_decay": spec.weight_decay}
        if spec.kind not in TAKES:
            more |= {"maximize": spec.maximize, "foreach": spec.foreach}
        if spec.fused:
            more["fused"] = True
        kind, keywords = _OPTIMIZERS[spec.kind]
        optimizer: torch.optim.Optimizer = kind(groups, **keywords, **more)
        return optimizer

    def _add_group(self, operation: ops.AddGroup) -> None:
        spec = self._program.optimizers[operation.optimizer]
        parameters = list(self.models[spec.module].parts[spec.without].parameters())
        group = {"params": parameters, "lr": operation.rate, "weight_decay": operation.decay}
        self.optimizers[operation.optimizer].add_param_group(group)

    def _forget_state(self, operation: ops.Initialize, parameter: torch.Tensor) -> None:
        """Drop what optimizers have of a parameter that is drawn anew, or begin it anew with zeros."""
        for optimizer in self.optimizers:
            if operation.forgets:
                optimizer.state.pop(parameter, None)
            slots = optimizer.state.get(parameter, {}) if operation.restarts else {}
            for value in slots.values():
                if isinstance(value, torch.Tensor) and value.dim():
                    value.zero_()

    def state(self) -> Values:
        """Return what ``observation.state`` should."""
        shown: Values = {}
        for number, model in enumerate(self.models):
            self._fill(number, self._buffers[0][number])
            shown |= {f"weights.{number}.{name}": each.clone() for name, each in model.state_dict().items()}
        for number, optimizer in enumerate(self.optimizers):
            shown |= {f"state.{number}.{name}": each.clone() for name, each in self._slots(number)}
            shown[f"rates.{number}"] = [group["lr"] for group in optimizer.param_groups]
        return shown if self._precision.factor is None else shown | {"factor": self._precision.next_factor()}

    def adopt(self, shown: Mapping[str, Any]) -> None:
        """Go on from the numbers a strategy showed, so that rounding does not grow from operation to operation.

        What it showed in another shape is not gone on from: it is the defect that is looked into.
        """
        mine: dict[str, torch.Tensor] = {
            f"weights.{number}.{name}": parameter
            for number, model in enumerate(self.models)
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }
        for number in range(len(self.optimizers)):
            mine |= {f"state.{number}.{name}": value for name, value in self._slots(number)}
        if self._average is not None:
            named = self._average.named_parameters(remove_duplicate=False)
            mine |= {f"averaged.{name}": parameter for name, parameter in named}
        found = {**shown, **{f"averaged.{name}": value for name, value in shown.get("averaged", {}).items()}}
        with torch.no_grad():
            for name, value in mine.items():
                if name in found and found[name].shape == value.shape:
                    value.copy_(found[name])

    def jitter(self, generator: torch.Generator) -> None:
        """Move weights and gradients by about two units in the last place, to see how far results follow.

        A gradient that is exactly zero may be rounding elsewhere, so gradients move by the largest of all.
        """
        parameters = [parameter for model in self.models for parameter in model.parameters() if parameter.numel()]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        largest = max([float(each.to_dense().abs().max()) for each in gradients], default=0.0)
        size = self._precision.jitter
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(1 + size * torch.randn(parameter.shape, generator=generator).to(parameter))
            for gradient in gradients:
                moved = size * largest * torch.randn(gradient.shape, generator=generator).to(gradient.dtype)
                # What a sparse gradient has no rows of is zero wherever it is computed.
                gradient.add_(moved.sparse_mask(gradient.coalesce()) if gradient.is_sparse else moved)

    def _each(
        self, turn: Callable[[int], Values], together: Callable[[list[Values]], Values] | None = None
    ) -> list[Values]:
        shown = []
        named = [pair for model in self.models for pair in model.named_parameters()]
        written = [each for name, each in named if not set(WRITING).isdisjoint(name.split("."))]
        before = [each.detach().clone() for each in written]
        for rank in self._ranks:
            with torch.no_grad():  # a forward writes to them, on each rank as on the first
                for parameter, values in zip(written, before, strict=True):
                    parameter.copy_(values)
            for number, buffers in enumerate(self._buffers[rank]):
                self._fill(number, buffers)
            torch.set_rng_state(self.generators[rank])
            self._calls = 0
            MASKS.given = self.masks[rank]
            shown.append(turn(rank))
            self.masks[rank] = MASKS.take()
            self.generators[rank] = torch.get_rng_state()
            self._buffers[rank] = [_buffers(model) for model in self.models]
        MASKS.given = []
        return [together(shown)] * len(shown) if together else shown

    def _grouped(self, module: int) -> list[torch.Tensor]:
        """List what the optimizers of a module hold."""
        mine = zip(self.optimizers, self._program.optimizers, strict=True)
        groups = [group for each, spec in mine if spec.module == module for group in each.param_groups]
        return [parameter for group in groups for parameter in group["params"]]

    def _run(self, module: int, given: Batch, rank: int, *, method: str = "forward", **given_too: bool) -> Any:
        """Run a method of a module as the strategy would: after an exchange of buffers, where its card says so.

        The precision's context stands around the module's own forward, and around no other method.
        """
        if self._exchanges[self._strategy] and method != "unwrapped":
            if rank == 0:
                self._sent.append([_buffers(model) for model in self.models])
            self._fill(module, self._sent[self._calls][module])
            self._calls += 1
        model = self._precision.working(module, self.models[module])
        given = given._replace(inputs=given.inputs.to(input_dtype(self._program.precision)))
        if method in ("score", "layers"):
            return getattr(model, method)(given, **given_too)
        with self._precision.forward():
            return model(given, **given_too)

    def _add(self, loss: torch.Tensor, **keywords: Any) -> None:
        self._note_trained()
        self._precision.backward(self.models, loss, len(self._ranks), **keywords)

    def _add_squares(self, module: int, wanted: bool) -> None:
        for parameter in self.models[module].parameters() if wanted else ():
            if parameter.requires_grad:
                self._add(0.01 * parameter.square().sum())

    def _train_top(self, module: int, trained: bool) -> None:
        """Freeze the layer on top of a module, or train it again, where gradients come to."""
        for each in (self.models[module], self._precision.working(module, self.models[module])):
            each.head.requires_grad_(trained)

    def _step(self, which: int) -> Values:
        """Step an optimizer, unless the loss was multiplied by too large a factor."""
        stepped = self._fits(which)
        self._note_trained()
        if stepped:
            self.optimizers[which].step()
        self._precision.record(stepped)
        self._counts[which] = Count()
        return {"stepped": stepped} | self.state()

    def _note_trained(self) -> None:
        """Record what is trained by now of what was frozen when it was built."""
        pairs = zip(self._untrained, self.models, strict=True)
        self._untrained = [untrained & _frozen(model) for untrained, model in pairs]

    def _fits(self, which: int) -> bool:
        """Check once, before gradients are clipped, that none has overflowed where the loss is multiplied."""
        count = self._counts[which]
        if count.fits is None:
            gradients = [each.grad for each in self._with_gradients(which) if each.grad is not None]
            count.fits = self._precision.fits(gradients)
        return count.fits

    def _note(self, operation: ops.Backward) -> None:
        """Count denominators, once for each backward."""
        calls = {"retain_graph": 2, "crossed": 2, "accumulated": ops.MICRO_BATCHES}.get(operation.how, 1)
        if operation.denominator:
            for spec, count in zip(self._program.optimizers, self._counts, strict=True):
                if operation.how == "through" or spec.module == operation.module:
                    count.total += calls * sum(operation.rows[rank] for rank in self._ranks)

    def _forget_discarded(self) -> None:
        """Begin anew, before a backward, where gradients are gone that had been looked at for overflows."""
        for number, count in enumerate(self._counts):
            if count.fits is False and not self._with_gradients(number):
                self._counts[number] = Count()

    def _divide(self, which: int) -> None:
        """Make the sums of an optimizer's gradients those of the global mean, once; look for overflows before."""
        self._fits(which)
        count = self._counts[which]
        if count.total and not count.divided:
            for parameter in self._with_gradients(which):
                assert parameter.grad is not None
                parameter.grad.mul_(len(self._ranks) / count.total)
            count.divided = True

    def _gradients(self, module: int) -> Values:
        """Return the gradients as a step would take them, of what an optimizer steps; of all where none does."""
        factors: dict[torch.Tensor, float] = {}
        for spec, optimizer, count in zip(self._program.optimizers, self.optimizers, self._counts, strict=True):
            if spec.module == module:
                factor = len(self._ranks) / count.total if count.total and not count.divided else 1.0
                factors |= {each: factor for group in optimizer.param_groups for each in group["params"]}
        if module not in [spec.module for spec in self._program.optimizers]:
            factors = dict.fromkeys(self.models[module].parameters(), 1.0)
        named = self.models[module].named_parameters(remove_duplicate=False)
        return {
            name: (each.grad * factors[each]).to_dense()
            for name, each in named
            if each in factors and each.grad is not None
        }

    def _seed(self, seed: int) -> None:
        self.generators = []
        for rank in self._ranks:
            digest = hashlib.blake2b(f"{seed},{rank}".encode(), digest_size=8).digest()
            torch.manual_seed(seed if rank == 0 else int.from_bytes(digest, "little") >> 1)
            self.generators.append(torch.get_rng_state())

    def _reduced(self, operation: ops.Reduce) -> Values:
        numbers = torch.stack([batch(operation.key, rank, 2).inputs for rank in self._ranks])
        if operation.how == "dict":
            return {"reduced": numbers.mean(0) + sum(self._ranks) / len(self._ranks)}
        whole = {"gather": numbers, "mean": numbers.mean(0), "sum": numbers.sum(0), "max": numbers.amax(0)}
        tracked = {"tracked": False} if operation.how == "gather" else {}
        return {"reduced": whole[operation.how], **tracked}

    def _snapshot(self, *, frozen: bool = True) -> Any:
        """Copy all that is saved; without what no step could have trained, if so asked."""
        for number, buffers in enumerate(self._buffers[0]):
            self._fill(number, buffers)
        states = [each.state_dict() for each in self._holders()]
        pairs = zip(self._untrained, self.models, strict=True)
        left_out = [set() if frozen else untrained & _frozen(model) for untrained, model in pairs]
        return copy.deepcopy((states, left_out, self.generators, self._precision.saved()))

    def _restore(self, saved: Any, *, modules_alone: bool = False) -> None:
        states, left_out, generators, factor = copy.deepcopy(saved)
        holders = self.models if modules_alone else self._holders()
        with self._kept(left_out):
            for holder, state in zip(holders, states, strict=not modules_alone):
                holder.load_state_dict(state)
        for number in range(len(self.models)):
            self._untrained[number] &= left_out[number]
            self._spread(number)
        if not modules_alone:
            self.generators = generators
            self._precision.restore(factor)

    @contextlib.contextmanager
    def _kept(self, left_out: Sequence[set[str]]) -> Iterator[None]:
        """Leave parameters as they are, and what optimizers have of them, whatever is loaded meanwhile."""
        kept = [
            (each, each.detach().clone(), [dict(optimizer.state.get(each, {})) for optimizer in self.optimizers])
            for model, names in zip(self.models, left_out, strict=True)
            for name, each in model.named_parameters()
            if name in names
        ]
        yield
        for parameter, values, slots in kept:
            with torch.no_grad():
                parameter.copy_(values)
            for optimizer, own in zip(self.optimizers, slots, strict=True):
                optimizer.state.pop(parameter, None)
                if own:
                    optimizer.state[parameter] = own

    def _holders(self) -> list[Any]:
        holders = [*self.models, *self.optimizers, *self._schedulers, self._average]
        return [each for each in holders if each is not None]

    def _spread(self, module: int) -> None:
        """Copy the buffers that were loaded to every rank."""
        for buffers in self._buffers:
            buffers[module] = _buffers(self.models[module])

    def _fill(self, module: int, buffers: Mapping[str, torch.Tensor]) -> None:
        for name, buffer in self.models[module].named_buffers():
            buffer.data = buffers[name].clone()

    def _with_gradients(self, which: int) -> list[torch.nn.Parameter]:
        groups = self.optimizers[which].param_groups
        return [each for group in groups for each in group["params"] if each.grad is not None]

    def _slots(self, which: int) -> list[tuple[str, torch.Tensor]]:
        """List an optimizer's state as views, by the parameters' first names."""
        names: dict[torch.Tensor, str] = {
            each: name for model in self.models for name, each in model.named_parameters()
        }
        return [
            (f"{names[parameter]}.{slot}", value)
            for parameter, slots in self.optimizers[which].state.items()
            for slot, value in slots.items()
            if isinstance(value, torch.Tensor)
        ]


def _frozen(model: Model) -> set[str]:
    """Return the names of parameters that are not trained."""
    return {name for name, each in model.named_parameters(remove_duplicate=False) if not each.requires_grad}


def _buffers(model: Model) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}
