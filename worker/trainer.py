"""Local training of a federated job: one client's half of a round, under the rule's corrections.

The whole op-DAG runs as one stage. A round is a pure function of (job seed, client, round), of the
broadcast and of what the client kept: every tensor begins as the broadcast, the client's own state
or else the job gave it, the optimizer begins anew, samples come in ``atoll.sampling``'s order, and
random ops draw by (seed, client, round, phase, step, op). Each step's gradient, from the mean loss of
one micro-batch, is corrected by the rule, then clipped, then given to the optimizer; weight decay
is the optimizer's, so rules see it as part of the loss. The learning rate is that of the round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from atoll.errors import JobFailed, UsageError
from atoll.execute import DTYPES, Executor
from atoll.job import OptimizerName, stepwise_groups
from atoll.ops import check_node
from atoll.sampling import Split, epoch_batches, held_out_batches, local_steps, op_seed_of, split
from strategies.base import Done
from strategies.checking import check_broadcast, check_optimizer, check_update
from strategies.layout import Layout
from worker.cancel import Cancel
from worker.optimizers import make_optimizer
from worker.stage import MAX_OUTPUT_BYTES

if TYPE_CHECKING:
    from atoll.federated import Federated
    from atoll.job import TrainingSpec
    from atoll.opdag import StateMeta, TensorMeta
    from atoll.program import StageProgram
    from strategies.base import Broadcast, ClientState, ClientUpdate, Correction, Phase, Strategy
    from strategies.layout import Array, Arrays

    Fields = Mapping[str, Array]

ROUND_STEPS = 1 << 32  # a round's steps have keys of their own among random draws
LOSS = "loss"  # the metric every update carries: mean over the first phase's steps


@dataclass(frozen=True)
class LocalModel:
    """What every client of a job computes with. ``tensors``: the job's own values by name, on the CPU,
    perhaps memory-mapped, never written; ``states`` describes parameters and buffers in the state dict's
    order, ``inputs`` the model's inputs."""

    program: StageProgram
    eval_program: StageProgram | None
    training: TrainingSpec
    states: Mapping[str, StateMeta]
    tensors: Mapping[str, Tensor]
    inputs: Mapping[str, TensorMeta]
    metrics: Mapping[str, int] = field(default_factory=dict)  # name -> op of the evaluation program

    @property
    def leaves(self) -> tuple[str, ...]:
        """Parameters and buffers of both programs, in the order of ``states``."""
        programs = [p for p in (self.program, self.eval_program) if p is not None]
        used = {name for p in programs for name in (*p.parameters, *p.buffers)}
        return tuple(name for name in self.states if name in used)

    @property
    def frozen(self) -> frozenset[str]:
        """Parameters that the optimizer's groups hold fixed."""
        groups = stepwise_groups(self.program.parameters, self.training.optimizer)
        return frozenset(name for name, group in groups.items() if group.frozen)

    def layout(self) -> Layout:
        """Roles of the leaves, before a rule adapts them."""
        return Layout.of_state({name: self.states[name] for name in self.leaves}, self.frozen)


class LocalData:
    """One client's samples: arrays by field, each with the samples along its first axis, perhaps
    memory-mapped. ``inputs``: input of the model -> field.

    UsageError when a field is missing, has another shape or dtype than the input, or another length.
    """

    def __init__(self, fields: Fields, inputs: Mapping[str, str], metas: Mapping[str, TensorMeta]) -> None:
        missing = [name for name in metas if inputs.get(name) not in fields]
        if missing:
            raise UsageError(
                f"input {missing[0]!r} takes field {inputs.get(missing[0])!r}; the data has {sorted(fields)}"
            )
        self._sources = {name: (fields[inputs[name]], meta) for name, meta in metas.items()}
        lengths = {len(array) for array, _ in self._sources.values()}
        if len(lengths) != 1:
            raise UsageError(f"fields of one data set have {sorted(lengths)} samples; give each as many")
        for name, (array, meta) in self._sources.items():
            if array.shape[1:] != meta.shape[1:] or (array.dtype.kind == "f" and "float" not in meta.dtype):
                raise UsageError(
                    f"field {inputs[name]!r} holds {array.dtype} samples of shape {array.shape[1:]}, input "
                    f"{name!r} takes {meta.dtype} {meta.shape[1:]}; register the data in that form"
                )
        self.n_samples = lengths.pop()
        self.batch = next(iter(metas.values())).shape[0]

    def take(self, samples: Array, device: torch.device) -> dict[str, Tensor]:
        """The micro-batch of these samples, in memory of torch's own: kernels look at alignment."""
        return {
            name: torch.from_numpy(array[samples]).to(device, DTYPES[meta.dtype], copy=True)
            for name, (array, meta) in self._sources.items()
        }


@dataclass(frozen=True)
class Client:
    """Who trains on what. ``name`` is part of every seed."""

    name: str
    data: LocalData
    split: Split

    @classmethod
    def of(cls, name: str, data: LocalData, held_out: float, seed: int) -> Client:
        """The client ``name`` with its own share held out."""
        return cls(name, data, split(data.n_samples, held_out, seed, name))

    @classmethod
    def whole(cls, name: str, data: LocalData) -> Client:
        """All of ``data`` for evaluation."""
        every = np.arange(data.n_samples)
        return cls(name, data, Split(every, every))


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Means over ``n_samples`` held-out samples of one client."""

    n_samples: int
    loss: float
    metrics: Mapping[str, float]


class LocalTrainer:
    """The programs, compiled once, and one set of working tensors; trains any client of the job.

    UsageError for a rule that the optimizer does not fit or for missing tensors, UnsupportedOp for a
    node that no honest capture makes. Not thread-safe.
    """

    def __init__(
        self,
        model: LocalModel,
        rule: Strategy,
        federated: Federated,
        device: torch.device | str = "cpu",
        *,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        check_optimizer(rule, model.training.optimizer)
        programs = [p for p in (model.program, model.eval_program) if p is not None]
        for program in programs:
            if program.n_stages != 1:
                raise UsageError(
                    f"stage {program.stage} of {program.n_stages}; a client runs the whole model"
                )
            for _, node in program.ops:
                check_node(node, max_output_bytes)
        self.model, self.rule, self.federated = model, rule, federated
        self.training = model.training
        self.device = torch.device(device)
        self.layout = rule.adapt(model.layout())
        self._tick = tick
        names = {n for p in programs for n in (*p.parameters, *p.buffers, *p.constants)}
        self._values = self._own(names)
        self._frozen = model.frozen | {
            n for n in model.program.parameters if not model.states[n].requires_grad
        }
        self._trainer = self._executor(model.program, differentiate=True)
        self._evaluator = (
            None if model.eval_program is None else self._executor(model.eval_program, differentiate=False)
        )
        self._trained = tuple(n for n in model.program.parameters if n in self._trainer.uses)
        self._parameters = {n: torch.nn.Parameter(self._values[n]) for n in self._trained}
        self._written = {*self._trained, *self._trainer.mutated_buffers}
        if self._evaluator is not None:
            self._written |= {*self._evaluator.mutated_buffers}
        self._set: set[str] = set()  # names whose value is not the job's own
        self._optimizer = make_optimizer(self._parameters, self.training.optimizer)

    # ---------------------------------------------------------------- a round

    def train(
        self,
        client: Client,
        broadcast: Broadcast,
        state: ClientState,
        cancel: Cancel | None = None,
        *,
        noise_seed: int = 0,
    ) -> tuple[ClientUpdate, ClientState]:
        """This client's answer to ``broadcast`` and its next state, to be kept once the answer is taken.

        ``noise_seed``: of what the rule draws on the client, known to it alone. BadUpdate for a
        broadcast that is not the rule's or an answer nobody would count, JobFailed when the loss is
        not finite, Cancelled.
        """
        check_broadcast(self.rule, self.layout, broadcast)
        cancel = cancel or Cancel()
        phases = self.rule.begin(self.layout, broadcast, state)
        done = []
        for at, phase in enumerate(phases):
            found = self._run_phase(client, broadcast, phase, at, cancel)
            # The next phase trains in the same memory.
            done.append(found if at == len(phases) - 1 else self._kept(found))
        update, after = self.rule.end(self.layout, broadcast, done, state, noise_seed)
        check_update(self.rule, self.layout, broadcast.round, update)
        return update, after

    def evaluate(
        self, client: Client, broadcast: Broadcast, state: ClientState, cancel: Cancel | None = None
    ) -> Evaluated:
        """What the model this client would use does on its held-out samples."""
        check_broadcast(self.rule, self.layout, broadcast)
        samples = client.split.held_out
        if not len(samples):
            raise UsageError("held_out = 0 leaves nothing to evaluate on; set evaluate_every=0")
        self._begin(self.rule.evaluate_with(broadcast, state))
        batches = list(held_out_batches(samples, client.data.batch))
        loss, metrics = self._measure(client, batches, cancel or Cancel())
        return Evaluated(min(len(samples), len(batches) * client.data.batch), loss, metrics)

    def steps_of(self, client: Client) -> int:
        """Local steps of a round."""
        rule = self.federated
        return local_steps(len(client.split.train), client.data.batch, rule.local_epochs, rule.local_steps)

    # ---------------------------------------------------------------- one phase

    def _run_phase(self, client: Client, broadcast: Broadcast, phase: Phase, at: int, cancel: Cancel) -> Done:
        self._begin(phase.start)
        wanted = self.rule.facts.needs_start_loss and at == 0
        start_loss = self._start_loss(client, broadcast, cancel) if wanted else None
        correction = phase.correction.mapped(self._tensor)
        rate = self.training.learning_rate(broadcast.round)
        for group in self._optimizer.param_groups if self._optimizer else ():
            group["lr"] = rate * group["lr_scale"]
        steps, first = self.steps_of(client), broadcast.round * ROUND_STEPS
        self._trainer.reseed(op_seed_of(self.training.seed, client.name))
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        step = 0
        for epoch in range(self.federated.local_epochs):
            if step == steps:
                break
            self._put(self.rule.at_epoch(self.layout, broadcast, epoch), self._trainer)
            for samples in self._epoch(client, broadcast.round, epoch):
                if step == steps:
                    break
                cancel.check()
                total += self._step(first + step, at, client.data.take(samples, self.device), correction)
                step += 1
            self._check_finite(broadcast.round, step, float(total))
        self._forget()
        optimizer = self.training.optimizer
        sgd = optimizer.name is OptimizerName.SGD
        return Done(
            self._arrays(),
            len(client.split.train),
            step,
            rate,
            optimizer.momentum if sgd else 0.0,
            sgd and optimizer.nesterov,
            start_loss,
            {LOSS: float(total) / step},
        )

    def _step(self, step: int, phase: int, inputs: Mapping[str, Tensor], correction: Correction) -> Tensor:
        executor, loss = self._trainer, self.model.program.loss
        assert loss is not None  # noqa: S101 - the program is the whole DAG
        out = executor.forward(step, phase, inputs, {})
        executor.backward(phase, {})
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                gradient = executor.gradient(name)
                if correction:
                    if gradient is None:
                        gradient = torch.zeros_like(parameter)
                    gradient = correction.gradient(name, gradient, parameter)
                parameter.grad = gradient
        self._clip()
        if self._optimizer is not None:
            self._optimizer.step()
        executor.zero_gradients()
        self._tick()
        return out[loss]

    def _clip(self) -> None:
        """To ``clip_norm``, after the correction: what a rule adds may grow without bound (FedDyn)."""
        optimizer = self.training.optimizer
        if optimizer.clip_norm is None:
            return
        grads = [p.grad for p in self._parameters.values() if p.grad is not None]
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in grads]
        scale = optimizer.gradient_scale(float(n) ** 2 for n in torch.stack(norms).tolist()) if norms else 1.0
        if scale != 1.0:
            for gradient in grads:
                gradient.mul_(scale)

    def _epoch(self, client: Client, at_round: int, epoch: int) -> Iterable[Array]:
        seed = self.training.seed
        return epoch_batches(client.split.train, client.data.batch, seed, client.name, at_round, epoch)

    def _check_finite(self, at_round: int, steps: int, total: float) -> None:
        if not math.isfinite(total):
            raise JobFailed(
                f"round {at_round}: the local loss is not finite after {steps} steps; lower the learning "
                "rate or set clip_norm"
            )

    def _start_loss(self, client: Client, broadcast: Broadcast, cancel: Cancel) -> float:
        """Mean over the first epoch's micro-batches, or as many of them as are trained on."""
        batches = list(self._epoch(client, broadcast.round, 0))[: self.steps_of(client)]
        return self._measure(client, batches, cancel)[0]

    # ---------------------------------------------------------------- evaluation

    def _measure(
        self, client: Client, batches: Iterable[Array], cancel: Cancel
    ) -> tuple[float, dict[str, float]]:
        """Mean loss and metrics of the evaluation program over ``batches``; buffers stay as they are."""
        if self._evaluator is None or self._evaluator.program.loss is None:
            raise UsageError("the job has no evaluation program; submit it again with this version")
        wanted = {LOSS: self._evaluator.program.loss, **self.model.metrics}
        found: dict[str, list[float]] = {name: [] for name in wanted}
        before = {n: self._values[n].clone() for n in self._evaluator.mutated_buffers}
        for micro, samples in enumerate(batches):
            cancel.check()
            out = self._evaluator.forward(0, micro, client.data.take(samples, self.device), {})
            for name, op in wanted.items():
                found[name].append(float(out[op]))
            self._tick()
        for name, value in before.items():
            self._values[name].copy_(value)
        means = {name: math.fsum(values) / len(values) for name, values in found.items()}
        return means.pop(LOSS), means

    # ---------------------------------------------------------------- tensors

    def _own(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Working copies, aligned and contiguous: the job's own may be a read-only file."""
        missing = sorted(n for n in names if n not in self.model.tensors)
        if missing:
            raise UsageError(f"the job lacks {len(missing)} tensors: {missing[:5]}")
        return {n: self.model.tensors[n].detach().to(self.device, copy=True).contiguous() for n in names}

    def _executor(self, program: StageProgram, *, differentiate: bool) -> Executor:
        training = self.training
        executor = Executor(
            program,
            self.device,
            training.precision,
            training.seed,
            recompute=training.recompute,
            differentiate=differentiate,
        )
        executor.load(self._values, self._frozen if differentiate else ())
        return executor

    def _begin(self, start: Arrays) -> None:
        """Every tensor as ``start`` says, else as the job gave it; no optimizer state."""
        for name in (self._set | self._written) - start.keys():
            if name in self._values:
                self._values[name].copy_(self.model.tensors[name])
        self._set = set()
        self._put(start)
        self._forget()

    def _put(self, arrays: Arrays, *only: Executor) -> None:
        if not arrays:
            return
        for name, array in arrays.items():
            if name not in self._values:
                raise UsageError(f"the rule {self.rule.name} sets {name!r}, which this model does not have")
            self._values[name].copy_(self._tensor(array))
            self._set.add(name)
        for executor in only or [e for e in (self._trainer, self._evaluator) if e is not None]:
            executor.refresh()

    def _tensor(self, array: Array) -> Tensor:
        """On the device; shares memory where it can."""
        shareable = array.flags.writeable and array.flags.c_contiguous
        return torch.from_numpy(array if shareable else np.array(array, order="C")).to(self.device)

    def _arrays(self) -> dict[str, Array]:
        """The working tensors as numpy sees them; on a CPU these are views."""
        return {name: self._values[name].detach().cpu().numpy() for name in self.layout.metas}

    def _kept(self, done: Done) -> Done:
        changed = self._written | self._set
        weights = {n: a.copy() if n in changed else a for n, a in done.weights.items()}
        return replace(done, weights=weights)

    def _forget(self) -> None:
        """Free gradients and optimizer state: the answer is made in their memory."""
        self._trainer.reset()
        self._trainer.zero_gradients()
        for parameter in self._parameters.values():
            parameter.grad = None
        if self._optimizer is not None:
            self._optimizer.state.clear()
