"""Capture proves itself: the graphs against the module, on one batch, before anything travels.

torch.export is silently wrong for a custom ``autograd.Function``, a tensor hook and a rebound
buffer; so the loss, every gradient and every buffer are compared. Dropout stays on: the plain
module and the graph draw from one generator in the same order (capture keeps every random op,
in order), so equal states give equal masks and a wrong rate would show. Two passes, so that
state carried from one forward to the next is seen too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from atoll.errors import CaptureError, SelfCheckError
from atoll.execute import Executor
from atoll.job import Precision
from atoll.opdag import OpDag
from atoll.program import stage_programs
from coordinator.capture.capture import Captured
from coordinator.capture.outcome import Outcome, outcome
from coordinator.capture.torch_export import as_trained, device_of

PASSES = 2
MAX_NAMED = 4  # differences named in one message
# Of the tensor's largest element: the graph adds a parameter's uses in another order.
TOLERANCE = {Precision.FP32: 5e-6, Precision.BF16: 5e-2}
# A gradient that is zero but for rounding is compared on the scale of the largest one.
FLOOR = 1e-3


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor that differs from the module's: its largest deviation, absolute and relative."""

    what: str
    absolute: float
    relative: float

    def __str__(self) -> str:
        return f"{self.what} by {self.absolute:.2e} (relative {self.relative:.1e})"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Largest relative deviation found, over all that was compared."""

    compared: int
    worst: float
    weight: float = 0.0  # of the batch, where the loss is a sum over one, ...
    total: float = 0.0  # ... and that sum, in evaluation mode


def self_check(
    module: nn.Module, captured: Captured, batch: Mapping[str, Tensor], seed: int = 0
) -> CheckResult:
    """Compare ``captured`` with ``module`` on ``batch``, in training and in evaluation mode.

    Raises SelfCheckError naming the loss, parameters or buffers that differ and by how much.
    The module is left as it was; works on a copy, so it needs its memory twice.
    """
    _refuse_hooks(module)
    try:
        plain = copy.deepcopy(module)
    except Exception as error:  # a module may hold anything
        raise CaptureError(f"the module cannot be copied to be checked: {error}") from error
    device = device_of(module, batch)
    state = {
        name: t.clone() if name in captured.train.buffers or name in captured.evaluation.buffers else t
        for name, t in captured.state.items()
    }
    check = _Check(captured, plain, {k: v.to(device) for k, v in batch.items()}, state, device)
    with torch.random.fork_rng(), as_trained(plain, True, captured.frozen):
        executor = check.executor(captured.train)
        for turn in range(PASSES):
            check.training_pass(executor, seed + turn)
    with torch.random.fork_rng(), as_trained(plain, False, captured.frozen):
        check.evaluation_pass(check.executor(captured.evaluation), seed)
    return CheckResult(check.compared, check.worst, check.weight, check.total)


def _refuse_hooks(module: nn.Module) -> None:
    """Hooks on a parameter itself do not survive a copy, so they are looked for."""
    for name, parameter in module.named_parameters():
        hooks = getattr(parameter, "_backward_hooks", None)
        late = getattr(parameter, "_post_accumulate_grad_hooks", None)
        if hooks or late:
            raise SelfCheckError(
                f"parameter {name!r} has a gradient hook, which does not travel to the workers; remove it, "
                "or compute its effect in forward"
            )


class _Check:
    def __init__(
        self,
        captured: Captured,
        plain: nn.Module,
        batch: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        self.captured = captured
        self.module = plain
        self.batch = batch
        self.state = state
        self.device = device
        self.compared = 0
        self.worst = 0.0
        self.weight, self.total = 0.0, 0.0  # of the evaluated batch, where the loss is a sum

    def executor(self, dag: OpDag) -> Executor:
        (program,) = stage_programs(dag, [0])
        executor = Executor(
            program, self.device, self.captured.precision, seed=None, differentiate=dag.training
        )
        executor.load(self.state, self.captured.frozen)
        return executor

    def training_pass(self, executor: Executor, seed: int) -> None:
        dag = self.captured.train
        self.module.zero_grad()
        with self.run("the module itself fails in training", seed):
            expected = self.plain()
            expected.loss.backward()  # type: ignore[no-untyped-call]
        with self.run("the captured graph fails in training", seed):
            out = executor.forward(0, 0, self.batch, {})
            executor.backward(0, {})
        found = out[dag.loss]
        gradients = {
            name: (parameter.grad, executor.gradient(name))
            for name, parameter in self.module.named_parameters()
        }
        scale = max(
            (float(g.abs().max()) for g, _ in gradients.values() if g is not None and g.numel()), default=0
        )
        differences = [
            *self.compare("the training loss differs", expected.loss.detach(), found, 0.0),
            *self.weights(dag, expected, out),
            *(
                difference
                for name, (ours, theirs) in gradients.items()
                for difference in self.compare(
                    f"the gradient of parameter {name!r} differs", ours, theirs, scale
                )
            ),
            *self.buffers("after a training forward"),
        ]
        executor.zero_gradients()
        self.conclude(differences)

    def evaluation_pass(self, executor: Executor, seed: int) -> None:
        with torch.no_grad():
            metrics = self.captured.evaluation.metrics
            with self.run("the module itself fails in evaluation", seed):
                expected = self.plain(metrics)
            with self.run("the captured graph fails in evaluation", seed):
                out = executor.forward(0, 0, self.batch, {})
                found = out[self.captured.evaluation.loss]
        self.conclude(
            [
                *self.compare("the evaluation loss differs", expected.loss, found, 0.0),
                *self.weights(self.captured.evaluation, expected, out),
                *(
                    difference
                    for name, op in metrics.items()
                    for difference in self.compare(
                        f"metric {name!r} differs", expected.metrics[name], out[op], 0.0
                    )
                ),
                *self.buffers("after an evaluation forward"),
            ]
        )

    def plain(self, metrics: Iterable[str] = ()) -> Outcome:
        # A module may write its inputs; the graph must see them as they were.
        inputs = {name: value.clone() for name, value in self.batch.items()}
        with self.autocast():
            return outcome(self.module, inputs, metrics, items=self.captured.items)

    def weights(self, dag: OpDag, expected: Outcome, out: Mapping[int, Tensor]) -> list[Difference]:
        if dag.weight is None or expected.weight is None:
            return []
        found = out[dag.weight]
        if not dag.training:
            self.weight, self.total = float(found), float(out[dag.loss])
        if not float(found) >= 0.0:
            raise CaptureError(
                f"the module returned a weight of {float(found)}; return how much its loss sums over, from 0"
            )
        return self.compare("the loss's weight differs", expected.weight.detach(), found, 0.0)

    def autocast(self) -> Any:
        if self.captured.precision is Precision.BF16:
            return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)
        return nullcontext()

    @contextmanager
    def run(self, failing: str, seed: int) -> Iterator[None]:
        """Run a side from one state of the generator; its failure becomes text."""
        torch.manual_seed(seed)
        try:
            yield
        except CaptureError:
            raise
        except Exception as error:  # a module may raise anything
            text = " ".join(str(error).split())[:300]
            raise SelfCheckError(f"{failing} on the check batch: {type(error).__name__}: {text}") from error

    def buffers(self, when: str) -> list[Difference]:
        known = {**self.captured.train.aliases, **self.captured.evaluation.aliases}
        return [
            difference
            for name, buffer in self.module.named_buffers()
            for difference in self.compare(
                f"buffer {name!r} {when} differs", buffer, self.state.get(known.get(name, name)), 0.0
            )
        ]

    def compare(
        self, what: str, expected: Tensor | None, found: Tensor | None, scale: float
    ) -> list[Difference]:
        """Empty when the two agree within the precision's tolerance."""
        self.compared += 1
        if expected is None and found is None:
            return []
        if expected is None or found is None:
            given = found if expected is None else expected
            size = float(given.abs().max()) if given is not None and given.numel() else 0.0
            side = "only the captured graph has one" if expected is None else "the captured graph has none"
            return [Difference(f"{what}: {side},", size, 1.0)]
        if expected.shape != found.shape:
            return [
                Difference(
                    f"{what} in shape, {tuple(expected.shape)} against {tuple(found.shape)},", 0.0, 1.0
                )
            ]
        if not expected.numel():
            return []
        a, b = expected.detach().double(), found.detach().double()
        absolute = float((a - b).abs().max())
        size = max(float(a.abs().max()), FLOOR * scale)
        relative = absolute / size if size else float(absolute > 0)
        if absolute != absolute and torch.equal(a.isnan(), b.isnan()):
            return [
                Difference(
                    f"{what.replace('differs', 'is not a number in the module itself')},", absolute, relative
                )
            ]
        self.worst = max(self.worst, relative)
        return (
            [] if relative <= TOLERANCE[self.captured.precision] else [Difference(what, absolute, relative)]
        )

    def conclude(self, differences: list[Difference]) -> None:
        if not differences:
            return
        ranked = sorted(differences, key=lambda d: -d.relative if d.relative == d.relative else float("-inf"))
        named = "; ".join(str(d) for d in ranked[:MAX_NAMED])
        more = f"; and {len(ranked) - MAX_NAMED} more" if len(ranked) > MAX_NAMED else ""
        raise SelfCheckError(
            f"the captured graph is not the module: {named}{more}. Usual causes: a custom autograd.Function, "
            "a tensor or module hook, a buffer rebound instead of written in place (self.buf = ...), Python "
            "state that changes between calls; express it in plain tensor ops"
        )
