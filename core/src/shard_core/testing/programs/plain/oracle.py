"""A program in plain PyTorch: what each rank should show, by the contract and with nothing of ours."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING

import torch

from shard_core.testing.programs import operations as ops
from shard_core.testing.programs.model import (
    Batch,
    Interruption,
    batch,
    contrast_of,
    fed_back,
    interleaved,
    loss_of,
    tensors_of,
)
from shard_core.testing.programs.plain.plain_run import Count, PlainRun, Values
from shard_core.testing.programs.plain.precisions import input_dtype
from shard_core.testing.programs.program import everything

if TYPE_CHECKING:
    from shard_core.testing.programs.operations import Operation

_METHODS = {"unwrap": "unwrapped", "method": "score", "layers": "layers"}
_NO_GRADIENTS = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "failed evaluation": torch.no_grad}


class Oracle(PlainRun):
    """Plays a program's operations one by one.

    Data ranks differ in their batches, their generators and their buffers. Gradients are summed over micro-batches and
    averaged over data ranks; with denominators they are those of the sum of all losses over the sum of all
    denominators. What is shown and saved is data rank 0's.
    """

    def play(self, operation: Operation) -> list[Values]:
        """Return what each data rank should show after an operation."""
        self._sent = []
        if isinstance(operation, ops.Backward):
            self._forget_discarded()
        match operation:
            case ops.Backward(how="contrastive"):
                shown = self._contrasted(operation)
            case ops.Backward():
                self._zero_between(operation)
                self._note(operation)
                shown = self._each(lambda rank: self._backward(operation, rank))
            case ops.Forward():
                shown = self._each(lambda rank: self._forward(operation, rank))
                if operation.how.startswith("interrupted"):
                    self._zero_all()
            case ops.Evaluate():
                shown = self._each(lambda rank: self._evaluate(operation, rank), together=interleaved)
            case ops.Closure():
                shown = self._closed(operation)
            case ops.ShowAverage():
                shown = self._evaluated_average(operation)
            case ops.Reduce():
                shown = [self._reduced(operation)] * len(self._ranks)
            case _:
                shown = [self._on_all(operation)] * len(self._ranks)
        return shown

    def _closed(self, operation: ops.Closure) -> list[Values]:
        optimizer = self.optimizers[operation.optimizer]
        optimizer.zero_grad()
        module = self._program.optimizers[operation.optimizer].module
        plain = ops.Backward(module=module, key=operation.key, rows=operation.rows)
        losses = self._each(lambda rank: self._backward(plain, rank))
        stepped = self._step(operation.optimizer)
        returned = stepped.pop("stepped")
        return [{**stepped, **(loss if operation.by_hand else {"stepped": returned})} for loss in losses]

    def _zero_between(self, operation: ops.Backward) -> None:
        """Zero, before it is played, what it zeroes after its forward, which neither reads nor writes gradients."""
        if operation.how in ("zeroed", "cleared"):
            self._on_all(ops.ZeroGrad(of_module=True, which=operation.module))
        elif operation.how == "dropped":
            self._on_all(ops.ZeroByHand(module=operation.module))
            self._forget_discarded()

    def _zero_all(self) -> None:
        for number in range(len(self.models)):
            self._on_all(ops.ZeroGrad(of_module=True, which=number))

    @functools.singledispatchmethod
    def _on_all(self, operation: Operation) -> Values:
        """Play an operation that is the same on all ranks."""
        raise NotImplementedError(operation)

    @_on_all.register(ops.ClipNorm)
    def _(self, operation: ops.ClipNorm) -> Values:
        self._divide(operation.optimizer)
        # The infinity norm of no element is an error in torch, and nothing in a norm of all.
        clipped = [each for each in self._with_gradients(operation.optimizer) if each.numel()]
        gradients = [each.grad for each in clipped if each.grad is not None]
        if operation.fails and not torch.nn.utils.get_total_norm(gradients, operation.norm_type).isfinite():
            return {"failed": True}
        norm = torch.nn.utils.clip_grad_norm_(clipped, operation.max_norm, operation.norm_type)
        return {"failed": False} if operation.fails else {"norm": norm}

    @_on_all.register(ops.ClipValue)
    def _(self, operation: ops.ClipValue) -> Values:
        self._divide(operation.optimizer)
        clipped = self._with_gradients(operation.optimizer)
        if clipped:  # torch has an error for none
            torch.nn.utils.clip_grad_value_(clipped, operation.value)
        return {}

    @_on_all.register(ops.Step)
    def _(self, operation: ops.Step) -> Values:
        self._divide(operation.optimizer)
        shown = self._step(operation.optimizer)
        return {name: value for name, value in shown.items() if name != "stepped" or not operation.by_hand}

    @_on_all.register(ops.ZeroGrad)
    def _(self, operation: ops.ZeroGrad) -> Values:
        owner = self.models[operation.which] if operation.of_module else self.optimizers[operation.which]
        owner.zero_grad(set_to_none=operation.set_to_none)
        for number, spec in enumerate(self._program.optimizers):
            if operation.which == (spec.module if operation.of_module else number):
                self._counts[number] = Count()
        return {}

    @_on_all.register(ops.ZeroByHand)
    def _(self, operation: ops.ZeroByHand) -> Values:
        found = [count.fits for count in self._counts]
        shown = self._on_all(ops.ZeroGrad(of_module=True, which=operation.module, set_to_none=operation.set_to_none))
        # Torch's gradient scaler is not told: a step skips for what it has found before.
        for count, fits in zip(self._counts, found, strict=True):
            count.fits = fits if fits is False else count.fits
        return shown

    @_on_all.register(ops.EditGradients)
    def _(self, operation: ops.EditGradients) -> Values:
        if operation.how == "clipped":
            torch.nn.utils.clip_grad_norm_(self.models[operation.module].parameters(), 0.5)
            return {}
        grouped = operation.how == "groups' data"
        held = self._grouped(operation.module) if grouped else self.models[operation.module].parameters()
        for gradient in [each.grad for each in held if each.grad is not None]:
            count = max(gradient.numel(), 1) if operation.how == "counted" else 1
            if operation.how == "infinite":
                gradient.fill_(float("inf"))
            else:
                gradient.mul_(operation.factor / count**0.5)
        return {}

    @_on_all.register(ops.EditWeights)
    def _(self, operation: ops.EditWeights) -> Values:
        parameters = list(self.models[operation.module].parameters())
        edited: list[torch.Tensor] = [parameters[operation.which % len(parameters)]]
        if operation.how.startswith("groups"):
            edited = self._grouped(operation.module)
        with torch.no_grad():
            for parameter in edited:
                parameter.mul_(operation.factor)
        return self.state() if operation.shown else {}

    @_on_all.register(ops.ChangeLearningRate)
    def _(self, operation: ops.ChangeLearningRate) -> Values:
        for group in self.optimizers[operation.optimizer].param_groups:
            group["lr"] *= operation.factor
        return {}

    @_on_all.register(ops.AddGroup)
    def _(self, operation: ops.AddGroup) -> Values:
        self._add_group(operation)
        self._added.append(operation)
        return self.state()

    @_on_all.register(ops.StepScheduler)
    def _(self, operation: ops.StepScheduler) -> Values:
        scheduler = self._schedulers[operation.optimizer]
        assert scheduler is not None
        scheduler.step()
        return {"rate": scheduler.get_last_lr()}

    @_on_all.register(ops.Freeze)
    def _(self, operation: ops.Freeze) -> Values:
        self.models[operation.module].parts[operation.part].requires_grad_(operation.trained)
        return {}

    @_on_all.register(ops.HookGradients)
    def _(self, operation: ops.HookGradients) -> Values:
        model = self.models[operation.module]
        for each in {model, self._precision.working(operation.module, model)}:
            for parameter in each.parts[operation.part].parameters():
                if parameter.requires_grad:
                    parameter.register_hook(functools.partial(torch.mul, operation.factor))
        return {}

    @_on_all.register(ops.Initialize)
    def _(self, operation: ops.Initialize) -> Values:
        """Draw on every rank, and keep what the first one draws."""
        parameters = list(self.models[operation.module].parameters())
        parameter = parameters[operation.which % len(parameters)]
        drawn = self._each(lambda _: {"values": torch.nn.init.normal_(parameter.detach().clone(), std=0.3)})
        with torch.no_grad():
            parameter.copy_(drawn[0]["values"])
        self._forget_state(operation, parameter)
        return self.state() if operation.shown else {}

    @_on_all.register(ops.UpdateAverage)
    def _(self, operation: ops.UpdateAverage) -> Values:
        del operation
        assert self._average is not None
        with torch.no_grad():
            for average, parameter in zip(self._average.parameters(), self.models[0].parameters(), strict=True):
                average.copy_(0.9 * average + 0.1 * parameter)
        return {}

    @_on_all.register(ops.ShowWeights)
    def _(self, operation: ops.ShowWeights) -> Values:
        del operation
        return self.state()

    @_on_all.register(ops.ShowParameters)
    def _(self, operation: ops.ShowParameters) -> Values:
        model = self.models[operation.module]
        self._fill(operation.module, self._buffers[0][operation.module])
        return {"full": {name: each.clone() for name, each in model.state_dict().items()}}

    @_on_all.register(ops.ShowGradients)
    def _(self, operation: ops.ShowGradients) -> Values:
        return {"gradients": self._gradients(operation.module)}

    @_on_all.register(ops.LoadStateDict)
    def _(self, operation: ops.LoadStateDict) -> Values:
        module, factor = operation.module, operation.factor
        self._fill(module, self._buffers[0][module])
        weights = self.models[module].state_dict()
        scaled = {name: each * factor if each.is_floating_point() else each for name, each in weights.items()}
        self.models[module].load_state_dict(scaled)
        self._spread(module)
        return self.state() if operation.shown else {}

    @_on_all.register(ops.ReloadOptimizer)
    def _(self, operation: ops.ReloadOptimizer) -> Values:
        optimizer = self.optimizers[operation.optimizer]
        optimizer.load_state_dict(optimizer.state_dict())
        return self.state() if operation.shown else {}

    @_on_all.register(ops.Seed)
    def _(self, operation: ops.Seed) -> Values:
        self._seed(operation.seed)
        return {}

    @_on_all.register(ops.Attempt)
    def _(self, operation: ops.Attempt) -> Values:
        del operation
        self._zero_all()
        self._seed(0)
        return self.state()

    @_on_all.register(ops.Save)
    def _(self, operation: ops.Save) -> Values:
        self._saved = self._snapshot(frozen=operation.frozen)
        return {}

    @_on_all.register(ops.Load)
    def _(self, operation: ops.Load) -> Values:
        alone = operation.how == "modules"
        self._restore(self._saved, modules_alone=alone)
        left = len(everything(self._program)) - len(self.models) if alone else 0
        return {"left": left, **self.state()}

    @_on_all.register(ops.Fail)
    def _(self, operation: ops.Fail) -> Values:
        if operation.how == "steps":  # which change nothing without gradients
            self._on_all(ops.ZeroGrad(which=operation.optimizer))
            self._note_trained()
        return {"failed": True, **self.state()}

    @_on_all.register(ops.SavePretrained)
    def _(self, operation: ops.SavePretrained) -> Values:
        self._fill(operation.module, self._buffers[0][operation.module])
        weights = self.models[operation.module].state_dict()
        self._written[operation.module] = {name: self._precision.stored(each) for name, each in weights.items()}
        return {}

    @_on_all.register(ops.LoadWeights)
    def _(self, operation: ops.LoadWeights) -> Values:
        self.models[operation.module].load_state_dict(self._written[operation.module])
        self._spread(operation.module)
        return self.state()

    @_on_all.register(ops.Switch)
    def _(self, operation: ops.Switch) -> Values:
        saved = self._saved if operation.resumed else self._snapshot()
        self._strategy = operation.strategy
        self._ranks = range(operation.world_size or len(self._ranks))
        self._build()
        self._restore(saved)
        return self.state()

    def _backward(self, operation: ops.Backward, rank: int) -> Values:
        module, rows = operation.module, operation.rows[rank]
        self.models[module].train(operation.how != "eval")
        given = batch(operation.key, rank, rows)
        reduction = "sum" if operation.denominator else "mean"
        extra = operation.extra and not (operation.alone and rank)

        def forward(which: Batch) -> torch.Tensor:
            return loss_of(self._run(module, which, rank, extra=extra), which, reduction)

        if operation.how == "crossed":
            loss, later = forward(given), forward(batch(operation.key + 1, rank, rows))
            self._add(later)
            self._add(loss)
            return {"loss": loss.detach(), "later": later.detach()}
        match operation.how:
            case "two_forwards":
                loss = forward(given) + forward(batch(operation.key + 1, rank, rows))
            case "accumulated":
                for micro in range(1, ops.MICRO_BATCHES):
                    self._add(forward(given))
                    given = batch(operation.key + micro, rank, rows)
                loss = forward(given)
            case "gradient":
                output = self.models[module].bend(tensors_of(self._run(module, given, rank, extra=extra))[0])
                self._add(output, gradient=0.1 * given.targets.to(output))
                return {"loss": output.detach().sum()}
            case "through" | "detached":
                fed = fed_back(given, self._run(0, given, rank), detached=operation.how == "detached")
                loss = loss_of(self._run(1, fed, rank), given, reduction)
            case "method" | "layers":
                score = self._run(module, given, rank, extra=extra, method=_METHODS[operation.how])
                loss = score.sum() if operation.denominator else score.mean()
            case "penalty" | "slopes" | "slopes by hand":
                inputs = given.inputs.to(input_dtype(self._program.precision)).requires_grad_()
                output = self._run(module, given._replace(inputs=inputs), rank, extra=extra)
                whole = operation.how == "penalty"
                loss = loss_of(output, given, reduction) if whole else tensors_of(output)[0].sum()
                (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
                loss = slope.square().mean() + (loss if whole else 0.0)
            case _:
                loss = forward(given)
        if operation.how == "retain_graph":
            self._add(loss, retain_graph=True)
            self._add(0.5 * loss)
        elif operation.how == "frozen":
            self._train_top(module, False)
            self._add(loss)
            self._train_top(module, True)
        else:
            self._add(loss)
        self._add_squares(module, operation.how == "squares")
        self.models[module].train()
        return {"loss": loss.detach()}

    def _contrasted(self, operation: ops.Backward) -> list[Values]:
        """Play a loss of each rank in which all ranks' outputs are, with the gradients of all losses for each."""

        def forward(rank: int) -> Values:
            given = batch(operation.key, rank, operation.rows[rank])
            return {"mine": tensors_of(self._run(operation.module, given, rank, extra=operation.extra))[0]}

        outputs = [each["mine"] for each in self._each(forward)]
        losses = [contrast_of(mine, torch.stack(outputs), rank) for rank, mine in enumerate(outputs)]
        self._add(torch.stack(losses).sum())
        return [{"loss": loss.detach()} for loss in losses]

    def _forward(self, operation: ops.Forward, rank: int) -> Values:
        model = self.models[operation.module]
        model.train(operation.how not in ("eval", "inference", "failed evaluation"))
        given = batch(operation.key, rank, 3)
        if operation.how.startswith("failed"):
            with contextlib.suppress(Interruption), _NO_GRADIENTS.get(operation.how, contextlib.nullcontext)():
                self._run(operation.module, given, rank, fails=True)
            model.train()
            return {}
        with _NO_GRADIENTS.get(operation.how, contextlib.nullcontext)():
            method = _METHODS.get(operation.how, "forward")
            output = tensors_of(self._run(operation.module, given, rank, method=method))[0]
        model.train()
        return {"output": output.detach().clone()}

    def _evaluated_average(self, operation: ops.ShowAverage) -> list[Values]:
        assert self._average is not None
        trained, self.models[0] = self.models[0], self._average
        shown = self._each(lambda rank: self._forward(ops.Forward(key=operation.key, how="eval"), rank))
        self._fill(0, self._buffers[0][0])
        averaged = {name: each.clone() for name, each in self._average.state_dict().items()}
        self.models[0] = trained
        return [each | {"averaged": averaged} for each in shown]

    def _evaluate(self, operation: ops.Evaluate, rank: int) -> Values:
        model = self.models[operation.module].eval()
        with torch.no_grad():
            outputs = tensors_of(self._run(operation.module, batch(operation.key, 0, operation.samples), rank))[0]
        model.train()
        return {"outputs": outputs}
