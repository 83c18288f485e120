"""Capture proves itself: the graphs against the module, on two batches, before anything travels.

torch.export is silently wrong for a rebound buffer and much else; so the loss, every gradient and every
buffer are compared. Dropout stays on: the plain module and the graph draw from one generator in the same
order (capture keeps every random op, in order), so equal states give equal masks and a wrong rate would show.
What a batch or two need not show is looked for by itself: Python state that forward changes
(``python_state``) and what it asks of the world outside (``unseen.watching``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from atoll.errors import CaptureError, SelfCheckError
from atoll.execute import Executor
from atoll.exported import uncompiled
from atoll.job import Precision
from atoll.opdag import OpDag, rows_of
from atoll.program import StageProgram, stage_programs
from coordinator.capture.capture import Captured
from coordinator.capture.outcome import Outcome, outcome, resized
from coordinator.capture.python_state import Change, Left, PythonState, ReadLeft
from coordinator.capture.torch_export import as_trained, device_of
from coordinator.capture.unseen import Carried, watching

Pass = Callable[[Executor, Mapping[str, Tensor], int], None]

_COUNT = (
    "keep it in a registered buffer that forward writes in place (self.calls.add_(1)) and choose by tensor "
    "ops (torch.where), or change it outside forward"
)
# What to write instead, by how the names of changes begin; the first that fits.
_INSTEAD = (
    (("Python's random", "numpy's random"), "draw random numbers by torch (torch.rand, dropout)"),
    (
        ("buffer", "parameter"),
        "write a buffer in place (self.level.copy_(...)); parameters are the optimizer's",
    ),
    (("requires_grad", "attribute 'training'"), "set it in job()"),
)
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


class _Deviates(SelfCheckError):
    """Values differ by more than the precision's tolerance."""


@uncompiled()
def self_check(
    module: nn.Module,
    captured: Captured,
    batch: Mapping[str, Tensor],
    seed: int = 0,
    second: Mapping[str, Tensor] | None = None,
) -> CheckResult:
    """Compare ``captured`` with ``module`` on ``batch`` and ``second``, in training and in evaluation mode.

    A deep network with batch norm turns the rounding of bf16 into half of a gradient, so what deviates there
    is compared in fp32 before it is refused. Raises SelfCheckError naming the loss, parameters or buffers
    that differ and by how much, or the Python state that forward changes. The module is left as it was;
    works on a copy that shares its parameters' memory, and needs that of their gradients twice.
    """
    _refuse_hooks(module)
    try:
        return _compared(module, captured, batch, seed, second)
    except _Deviates:
        if captured.precision is Precision.FP32:
            raise
        with suppress(SelfCheckError):
            return _compared(module, replace(captured, precision=Precision.FP32), batch, seed, second)
        raise


def _compared(
    module: nn.Module,
    captured: Captured,
    batch: Mapping[str, Tensor],
    seed: int,
    second: Mapping[str, Tensor] | None,
) -> CheckResult:
    plain = _copy(module)
    device = device_of(module, batch)
    state = {
        name: t.clone() if name in captured.train.buffers or name in captured.evaluation.buffers else t
        for name, t in captured.state.items()
    }
    batches = [{k: v.to(device) for k, v in given.items()} for given in (batch, second or batch)]
    check = _Check(captured, plain, batches, state, device)
    found = PythonState(plain)  # globals are the process's own
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    try:
        with torch.random.fork_rng(), as_trained(plain, True, captured.frozen):
            check.passes(check.training_pass, check.executor(captured.train), seed)
        with torch.random.fork_rng(), as_trained(plain, False, captured.frozen):
            check.passes(check.evaluation_pass, check.executor(captured.evaluation), seed)
            if (tail := captured.evaluation.tail) is not None:
                rows = resized(batches[0], rows_of(tail.inputs))
                check.evaluation_pass(check.executor(tail), rows, seed)
        with torch.random.fork_rng():
            check.refuse_carried(seed)
    except SelfCheckError as error:
        if any(parameter.grad is not before for parameter, before in gradients):
            raise SelfCheckError(
                "forward reaches the job's own module, not the one that it is called on (by a closure or a "
                "global), so that it cannot be checked on a copy; give it self"
            ) from error
        raise
    finally:
        found.restore()
        for parameter, before in gradients:
            parameter.grad = before
    return CheckResult(check.compared, check.worst, check.weight, check.total)


def _copy(module: nn.Module) -> nn.Module:
    # Results of an earlier forward that hooks and owners keep as attributes are copied as values.
    kept = {
        id(value): value.detach().clone()
        for part in module.modules()
        for value in vars(part).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    # A class of its own may hold anything.
    kept |= {id(p): _shared(p) for p in module.parameters() if type(p) is nn.Parameter}
    try:
        return copy.deepcopy(module, dict(kept))
    except Exception as error:  # a module may hold anything
        raise CaptureError(
            _not_copied(module) or f"the module cannot be copied to be checked: {error}"
        ) from error


def _shared(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter with a gradient of its own on the same memory: no graph writes a parameter."""
    found = nn.Parameter(parameter.detach(), parameter.requires_grad)
    vars(found).update(vars(parameter))
    return found


def _not_copied(module: nn.Module) -> str:
    """Say which attribute keeps a module from being copied, "" where it is none by itself."""
    for path, part in module.named_modules():
        for key, value in vars(part).items():
            if key in ("_modules", "_parameters", "_buffers"):
                continue
            try:
                copy.deepcopy(value, {id(part): None})
            except Exception as error:  # noqa: BLE001 - as above
                name = f"attribute {f'{path}.{key}' if path else key!r}"
                if isinstance(value, Generator):
                    return (
                        f"{name} is a generator, which moves on whenever it is read, and the graph would "
                        "not; keep what forward needs in a registered buffer, or read it outside forward"
                    )
                return (
                    f"{name} cannot be copied ({error}), and the module is checked on a copy; keep it "
                    "outside the module"
                )
    return ""


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
        batches: Sequence[Mapping[str, Tensor]],
        state: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        self.captured = captured
        self.module = plain
        self.batches = batches
        self.state = state
        self.device = device
        self.compared = 0
        self.worst = 0.0
        self.first = True  # of the batches
        self.weight, self.total = 0.0, 0.0  # of the first batch, where the loss is a sum
        trained = [p for n, p in plain.named_parameters() if p.requires_grad and n not in captured.frozen]
        written = {name for name, buffer in captured.train.buffers.items() if buffer.mutated}
        buffers = dict(plain.named_buffers())
        self.carried = Carried(
            [*trained, *(buffer for name, buffer in buffers.items() if name in written)],
            [*plain.parameters(), *buffers.values()],
        )

    def executor(self, dag: OpDag) -> Executor:
        (program,) = stage_programs(dag, [0])
        executor = Executor(
            program, self.device, self.captured.precision, seed=None, differentiate=dag.training
        )
        executor.load(self.state, self.captured.frozen)
        return executor

    def passes(self, one: Pass, executor: Executor, seed: int) -> None:
        """Run ``one`` on each batch. SelfCheckError where the second pass finds other Python state than the
        first, or tensors that the one before has left."""
        states = [PythonState(self.module)]
        for turn, batch in enumerate(self.batches):
            self.first = turn == 0
            try:
                one(executor, batch, seed + turn)
            except SelfCheckError as error:
                now = PythonState(self.module)
                # What changes to and fro is as it was two calls ago.
                if changes := states[0].changes(now) or states[-1].changes(now):
                    raise SelfCheckError(f"{_changed(changes)}. After that {error}") from error
                raise
            states.append(PythonState(self.module))
        changes = states[1].changes(states[2])
        made = [change for change in changes if change.made_anew and change.put is not None]
        if len(made) < len(changes):
            raise SelfCheckError(_changed([change for change in changes if change not in made]))
        if made:
            self.without_what_was_left(made, seed)

    def refuse_carried(self, seed: int) -> None:
        """SelfCheckError where a call reads what one before a step computed from what the step changes."""
        if self.carried.kept and not self.carried.line:  # evaluations keep it: perhaps a step ends that
            for training in (True, False):
                with (
                    as_trained(self.module, training, self.captured.frozen),
                    self.run("the module itself fails at another call", seed),
                ):
                    self.plain(self.batches[0])
        if self.carried.line:
            raise SelfCheckError(
                "forward reads a tensor that an earlier call computed from what training changes (at "
                f"{self.carried.line}), and the graph would compute it anew at every step; compute it in "
                "__init__() or job(), and keep it as a registered buffer"
            )

    def without_what_was_left(self, made: Sequence[Change], seed: int) -> None:
        """Run forward without the tensors that each call makes anew. SelfCheckError where it reads one."""
        for change in made:
            if change.put is not None:
                change.put(Left(change.name))
        buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        with self.run("the module itself fails at another call", seed):
            try:
                self.plain(self.batches[0])
            except ReadLeft as error:
                raise SelfCheckError(
                    f"forward reads {error}, a tensor that the call before has left there, which the graph "
                    f"would not hold; {_COUNT}"
                ) from error
        with torch.no_grad():
            for buffer, before in buffers:  # the graph has not run
                buffer.copy_(before)

    def training_pass(self, executor: Executor, batch: Mapping[str, Tensor], seed: int) -> None:
        dag = self.captured.train
        self.module.zero_grad()
        with self.run("the module itself fails in training", seed):
            expected = self.plain(batch)
            expected.loss.backward()  # type: ignore[no-untyped-call]
        with self.run("the captured graph fails in training", seed):
            out = executor.forward(0, 0, _copied(batch), {})
            executor.backward(0, {})
        found = out[dag.loss]
        gradients = {
            name: (_dense(parameter.grad), executor.gradient(name))
            for name, parameter in self.module.named_parameters()
        }
        scale = max(
            (float(g.abs().max()) for g, _ in gradients.values() if g is not None and g.numel()), default=0
        )
        differences = [
            *self.losses("the training loss differs", expected.loss, found),
            *self.weights(executor.program, expected, out, training=True),
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

    def evaluation_pass(self, executor: Executor, batch: Mapping[str, Tensor], seed: int) -> None:
        program, metrics = executor.program, dict(executor.program.metrics)
        assert program.loss is not None  # noqa: S101 - it is the whole graph
        with torch.no_grad():
            with self.run("the module itself fails in evaluation", seed):
                expected = self.plain(batch, metrics)
            with self.run("the captured graph fails in evaluation", seed):
                out = executor.forward(0, 0, _copied(batch), {})
        self.conclude(
            [
                *self.losses("the evaluation loss differs", expected.loss, out[program.loss]),
                *self.weights(program, expected, out),
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

    def losses(self, what: str, expected: Tensor, found: Tensor) -> list[Difference]:
        """A batch without targets has no mean, here and there; its gradients are compared all the same."""
        if expected.isnan() and found.isnan():
            return []
        return self.compare(what, expected.detach(), found, 0.0)

    def plain(self, batch: Mapping[str, Tensor], metrics: Iterable[str] = ()) -> Outcome:
        self.carried.next_call(any(part.training for part in self.module.modules()))
        with self.autocast(), watching(), self.carried:
            return outcome(self.module, _copied(batch), metrics, items=self.captured.items)

    def weights(
        self, program: StageProgram, expected: Outcome, out: Mapping[int, Tensor], *, training: bool = False
    ) -> list[Difference]:
        if program.weight is None or expected.weight is None:
            return []
        found = out[program.weight]
        if self.first and not training and program.loss is not None:
            self.weight, self.total = float(found), float(out[program.loss])
        if not float(found) >= 0.0:
            raise CaptureError(
                f"the module returned a weight of {float(found)}; return the amount that its loss sums over, "
                "0 or more"
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
                f"buffer {name!r} {when} differs",
                *_without_infinities(buffer, self.state.get(known.get(name, name))),
                0.0,
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
            if not self.first:  # a micro-batch without a label may have none
                return []
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
        raise _Deviates(
            f"the captured graph is not the module: {named}{more}. Usual causes: a custom autograd.Function, "
            "a tensor or module hook, a buffer rebound instead of written in place (self.buf = ...), Python "
            "state that changes between calls, a branch on requires_grad or torch.is_grad_enabled(); express "
            "it in plain tensor ops"
        )


def _changed(changes: Sequence[Change]) -> str:
    named = ", ".join(str(change) for change in changes[:MAX_NAMED])
    more = f" and {len(changes) - MAX_NAMED} more" if len(changes) > MAX_NAMED else ""
    instead = next((words for begin, words in _INSTEAD if changes[0].name.startswith(begin)), _COUNT)
    return f"forward changes {named}{more}, but the captured graph keeps the state from submit; {instead}"


def _copied(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The batch for one forward, which may write its inputs."""
    return {name: value.clone() for name, value in batch.items()}


def _without_infinities(expected: Tensor, found: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Two buffers without what both of them hold infinite at one place, as masks do."""
    if found is None or expected.shape != found.shape or not expected.is_floating_point():
        return expected, found
    same = expected.isinf() & (expected == found)
    return expected.masked_fill(same, 0.0), found.masked_fill(same, 0.0)


def _dense(gradient: Tensor | None) -> Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.layout != torch.strided else gradient
