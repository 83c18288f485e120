"""Local training of a federated job: one client's half of a round, under the rule's corrections.

The whole op-DAG runs as one stage. A round is a pure function of (job seed, client, round), of the
broadcast and of what the client kept. Every tensor begins as the broadcast, the client's own state
or else the job gave it, the optimizer begins anew, samples come in ``atoll.sampling``'s order, and
random ops draw by (seed, client, round, phase, step, op). Each step's gradient, from the mean loss of
one micro-batch, is corrected by the rule, then clipped, then given to the optimizer; weight decay
is the optimizer's, so rules see it as part of the loss. The learning rate is that of the round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from atoll.errors import AtollError, JobFailed, UsageError
from atoll.execute import Executor
from atoll.federated import Floors
from atoll.held_out import HeldOutMeans
from atoll.job import OptimizerName, Place
from atoll.messages.from_worker import EvaluatedRow
from atoll.ops import check_node
from atoll.rehearse import rehearse
from atoll.rows import at_rows, inputs_at
from atoll.sampling import epoch_batches, held_out_batches, local_steps, op_seed_of
from strategies.checking import check_broadcast, check_optimizer, check_update
from strategies.counted import check_measured, check_numbers, returned_numbers, values_of
from strategies.layout import SHARED, Role, own_parts
from strategies.returned import check_returned, check_rows
from strategies.values import ClientUpdate, Done
from worker.cancel import Cancel
from worker.federated.owner.floors import check_held_out, check_job, check_update_floors
from worker.federated.samples.noised import NoisedGradients, check_apart
from worker.federated.working_tensors import WorkingTensors
from worker.stage.digests import norm
from worker.stage.optimizers import make_optimizer
from worker.stage.stage import MAX_OUTPUT_BYTES

if TYPE_CHECKING:
    from atoll.federated import Federated
    from atoll.program import StageProgram
    from atoll.rehearse import OpCost
    from strategies.base import Strategy
    from strategies.layout import Array, Arrays
    from strategies.values import Broadcast, ClientState, Correction, Phase
    from worker.federated.local_model import Client, LocalModel

ROUND_STEPS = 1 << 32  # a round's steps have keys of their own among random draws
LOSS = "loss"  # the metric every update carries: mean over the first phase's steps


@dataclass(frozen=True, slots=True)
class Trained:
    """A client's answer, and its next state, to be kept once the answer is taken. ``square_loss``: mean
    of the squared losses of the first phase's micro-batches (Oort's utility)."""

    update: ClientUpdate
    state: ClientState
    square_loss: float


class LocalTrainer:
    """The programs, compiled once, and one set of working tensors; trains any client of the job.

    UsageError for a rule that the optimizer does not fit, for missing tensors or a job below ``floors``;
    UnsupportedOp for a node that no honest capture makes, or a graph that would take data home. Not
    thread-safe.
    """

    def __init__(
        self,
        model: LocalModel,
        rule: Strategy,
        federated: Federated,
        device: torch.device | str = "cpu",
        *,
        floors: Floors | None = None,
        noised: bool = False,
        tick: Callable[[], None] = lambda: None,
        made: Callable[[Executor, Mapping[int, OpCost]], None] = lambda executor, costs: None,
    ) -> None:
        """``made``: called with what evaluates micro-batches of other numbers of rows, and its costs."""
        check_optimizer(rule, model.training.optimizer)
        programs = [p for p in (model.program, model.eval_program) if p is not None]
        for program in programs:
            if program.n_stages != 1:
                raise UsageError(
                    f"stage {program.stage} of {program.n_stages}; a client runs the whole model"
                )
            for _, node in program.ops:
                check_node(node, MAX_OUTPUT_BYTES)
        self.floors = floors or Floors()
        check_job(federated, self.floors)
        check_returned(programs, model.inputs, model.metas(), rule, self.floors)
        self.model, self.rule, self.federated = model, rule, federated
        self.training = model.training
        self.device = torch.device(device)
        self.layout = rule.adapt(own_parts(model.layout(), federated.local))
        rule.fit(self.layout)
        buffers = {name for program in programs for name in program.buffers}
        self._sample_values = values_of(model.inputs)
        # Noise lies on every number of an update, so then they need not be few.
        self._numbers = 0 if noised else returned_numbers(self.layout, buffers, rule)
        check_numbers(self._numbers, self.floors, self._sample_values, None, self.training.steps)
        self._tick, self._made = tick, made
        sent = frozenset(self.layout.names(*SHARED, Role.TOLD))
        names = {n for p in programs for n in (*p.parameters, *p.buffers, *p.constants)}
        self._work = WorkingTensors(model.tensors, names, sent, self.device)
        values = self._work.values
        self._frozen = model.frozen | {
            n for n in model.program.parameters if not model.states[n].requires_grad
        }
        self._trainer = self._executor(model.program, differentiate=True)
        self._evaluator = (
            None if model.eval_program is None else self._executor(model.eval_program, differentiate=False)
        )
        self._at_rows: dict[int, Executor | None] = {}  # evaluators of other numbers of rows, None: cannot be
        self._trained = tuple(n for n in model.program.parameters if n in self._trainer.uses)
        self._parameters = {n: torch.nn.Parameter(values[n]) for n in self._trained}
        self._work.written.update(self._trained, *(e.mutated_buffers for e in self.executors))
        self._held: Collection[str] = ()  # parameters that the phase does not train
        self._optimizer = make_optimizer(self._parameters, self.training.optimizer, model.states)
        self._rate = 0.0  # of the round
        self._noised: NoisedGradients | None = None
        if federated.sample_privacy is not None:
            check_apart(model.program, model.inputs, model.metas(), self.floors.batch)
            self._noised = NoisedGradients(self._trainer, federated.sample_privacy, self.device, tick)

    # ---------------------------------------------------------------- a round

    def train(
        self,
        client: Client,
        broadcast: Broadcast,
        state: ClientState,
        cancel: Cancel | None = None,
        *,
        noise_seed: int = 0,
        loaded: Callable[[], None] = lambda: None,
    ) -> Trained:
        """This client's answer to ``broadcast``.

        ``noise_seed``: of what the rule draws on the client, known to it alone. ``loaded``: called when
        ``broadcast`` was read and the steps do not need it. BadUpdate for a
        broadcast that is not the rule's or an answer nobody would count, JobFailed when the loss is
        not finite, Cancelled.
        """
        check_broadcast(self.rule, self.layout, broadcast)
        self.check_client(client)
        cancel, state = cancel or Cancel(), replace(state, client=client.name)
        done, square_loss = self._run_phases(client, broadcast, state, cancel, loaded)
        update, after = self.rule.end(self.layout, broadcast, done, state, noise_seed)
        check_update(self.rule, self.layout, broadcast.round, update)
        if not self.federated.shows_losses:  # no noise or mask covers them, so none leaves
            update, square_loss = replace(update, metrics={LOSS: 0.0}), 0.0
        return Trained(update, after, square_loss)

    def nothing(self, client: Client, broadcast: Broadcast, state: ClientState) -> Trained:
        """Return the answer of a client whose data change nothing."""
        metas = self.layout.metas_of(*SHARED)
        delta = {name: np.zeros(meta.shape, meta.dtype) for name, meta in metas.items()}
        samples, steps = len(client.split.train), self.steps_of(client)
        update = ClientUpdate(broadcast.round, samples, steps, delta, {}, {}, {LOSS: 0.0}, client.name)
        return Trained(update, state, 0.0)

    def evaluate(
        self,
        client: Client,
        broadcast: Broadcast,
        state: ClientState,
        cancel: Cancel | None = None,
        *,
        loaded: Callable[[], None] = lambda: None,
    ) -> EvaluatedRow:
        """What the model this client would use does on its held-out samples. ``loaded``: as of ``train``."""
        check_broadcast(self.rule, self.layout, broadcast)
        samples = client.split.held_out
        if not len(samples):
            raise UsageError("held_out = 0 leaves nothing to evaluate on; set evaluate_every=0")
        self.check_evaluation(client)
        self._begin(self.rule.evaluate_with(broadcast, state))
        loaded()
        batches = self._held_out(samples, client.data.batch)
        loss, metrics = self._measure(client, batches, cancel or Cancel())
        return EvaluatedRow(sum(map(len, batches)), loss, metrics)

    @property
    def executors(self) -> tuple[Executor, ...]:
        """What computes: of the training program, and of the evaluation program where there is one."""
        return (self._trainer, *(() if self._evaluator is None else (self._evaluator,)))

    def rest(self) -> None:
        """Give the system the memory of all that the next broadcast sets anyway.

        Answers lie in the same memory: they are lost, unless they were written or copied before.
        """
        self._forget()
        self._work.rest()

    def steps_of(self, client: Client) -> int:
        """Local steps of a round."""
        rule = self.federated
        return local_steps(len(client.split.train), client.data.batch, rule.local_epochs, rule.local_steps)

    def check_client(self, client: Client) -> None:
        """UsageError when the client's update would be of fewer samples or steps than its owner demands."""
        samples, batch = len(client.split.train), client.data.batch
        check_update_floors(samples, self.steps_of(client), self.floors)
        check_numbers(self._numbers, self.floors, self._sample_values, samples, self.training.steps)
        if self.rule.statistics and samples < batch and self.floors.batch > 1:
            raise UsageError(
                f"{samples} samples repeat within a micro-batch of {batch}, so {self.rule.name}'s statistics "
                "of a class might be one sample's; register more data, or make the job's micro-batch smaller"
            )

    def check_evaluation(self, client: Client) -> None:
        """UsageError when the client's metrics would be means of too few samples for their number."""
        samples, batch = len(client.split.held_out), client.data.batch
        check_held_out(samples, batch, self.floors)
        metrics = len(self._evaluator.program.metrics) if self._evaluator is not None else 0
        check_measured(metrics, self.floors, self._sample_values)

    # ---------------------------------------------------------------- one phase

    def _run_phases(
        self,
        client: Client,
        broadcast: Broadcast,
        state: ClientState,
        cancel: Cancel,
        loaded: Callable[[], None],
    ) -> tuple[list[Done], float]:
        """All phases, and the first one's mean squared loss. What they were begun with is freed here,
        before the answer is made."""
        phases = self.rule.begin(self.layout, broadcast, state)
        done: list[Done] = []
        square_losses = []
        for at, phase in enumerate(phases):
            found, square_loss = self._run_phase(client, broadcast, phase, at, cancel, loaded)
            square_losses.append(square_loss)
            # The next phase trains in the same memory.
            done.append(found if at == len(phases) - 1 else self._kept(found))
        return done, square_losses[0]

    def _run_phase(
        self,
        client: Client,
        broadcast: Broadcast,
        phase: Phase,
        at: int,
        cancel: Cancel,
        loaded: Callable[[], None],
    ) -> tuple[Done, float]:
        """What came of it, and the mean of the squared losses."""
        self._begin(phase.start, phase.carried)
        self._held = phase.frozen
        if not phase.correction:
            loaded()
        wanted = self.rule.facts.needs_start_loss and at == 0
        start_loss = self._start_loss(client, broadcast, cancel) if wanted else None
        optimizer, rate = self.training.optimizer, self.training.learning_rate(broadcast.round)
        self._rate = rate
        self._trainer.reseed(op_seed_of(self.training.seed, client.name))
        losses = self._learn(client, broadcast, phase.correction.mapped(self._work.tensor), at, cancel)
        self._forget()
        sgd = optimizer.name is OptimizerName.SGD
        done = Done(
            self._work.arrays(self.layout.metas),
            len(client.split.train),
            len(losses),
            rate,
            optimizer.momentum if sgd else 0.0,
            sgd and optimizer.nesterov,
            start_loss,
            {LOSS: math.fsum(losses) / len(losses)},
        )
        return done, math.fsum(loss * loss for loss in losses) / len(losses)

    def _learn(
        self, client: Client, broadcast: Broadcast, correction: Correction, phase: int, cancel: Cancel
    ) -> list[float]:
        """All local steps; returns their losses."""
        steps, first = self.steps_of(client), broadcast.round * ROUND_STEPS
        losses: list[float] = []
        for epoch in range(self.federated.local_epochs):
            left = steps - len(losses)
            if not left:
                break
            if anew := self.rule.at_epoch(self.layout, broadcast, epoch):
                self._work.put(anew)
                self._trainer.refresh()
            found = []
            for at, samples in enumerate(islice(self._epoch(client, broadcast.round, epoch), left)):
                cancel.check()
                found.append(self._step(first + len(losses) + at, phase, client, samples, correction))
            losses += torch.stack(found).double().tolist()  # one wait for the device an epoch
            self._check_finite(broadcast.round, losses)
        return losses

    def _step(self, step: int, phase: int, client: Client, samples: Array, correction: Correction) -> Tensor:
        executor, loss = self._trainer, self.model.program.loss
        assert loss is not None  # noqa: S101 - the program is the whole DAG
        if self._noised is None:
            out = executor.forward(step, phase, client.data.take(samples, self.device), {})[loss]
            executor.backward(phase, {})
            of: Callable[[str], Tensor | None] = executor.gradient
        else:
            out = torch.zeros(())  # no loss leaves, nor decides anything
            of = self._noised.gradients(step, phase, client, self._parameters, self._held).get
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                gradient = of(name)
                if correction:
                    if gradient is None:
                        gradient = torch.zeros_like(parameter)
                    gradient = correction.gradient(name, gradient, parameter)
                parameter.grad = None if name in self._held else gradient
        self._clip()
        if self._optimizer is not None:
            self._optimizer.step(self._rate)
        executor.zero_gradients()
        for parameter in self._parameters.values():
            parameter.grad = None  # now: the next backward makes its own beside it
        self._tick()
        return out

    def _clip(self) -> None:
        """To ``clip_norm``, after the correction: what a rule adds may grow without bound (FedDyn)."""
        optimizer = self.training.optimizer
        if optimizer.clip_norm is None:
            return
        grads = [p.grad for p in self._parameters.values() if p.grad is not None]
        norms = [norm(g) for g in grads]
        scale = optimizer.gradient_scale(float(n) ** 2 for n in torch.stack(norms).tolist()) if norms else 1.0
        if scale != 1.0:
            for gradient in grads:
                gradient.mul_(scale)

    def _epoch(self, client: Client, at_round: int, epoch: int) -> Iterable[Array]:
        seed = self.training.seed
        return epoch_batches(client.split.train, client.data.batch, seed, client.name, at_round, epoch)

    def _check_finite(self, at_round: int, losses: list[float]) -> None:
        bad = next((at for at, loss in enumerate(losses) if not math.isfinite(loss)), None)
        if bad is not None:
            raise JobFailed(
                f"round {at_round}: the local loss is {losses[bad]} at step {bad + 1} of {len(losses)}; "
                "lower the learning rate or set clip_norm"
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
        means = HeldOutMeans(self._evaluator.program)
        before = {n: self._work.values[n].clone() for n in self._evaluator.mutated_buffers}
        for micro, samples in enumerate(batches):
            cancel.check()
            evaluator = self._evaluator_of(len(samples)) or self._evaluator
            out = evaluator.forward(0, micro, client.data.take(samples, self.device), {})
            means.add(out, len(samples))
            self._tick()
        for name, value in before.items():
            self._work.values[name].copy_(value)
        found = means.take()
        if found is None:
            raise UsageError("nothing to evaluate on")
        return found.loss, dict(found.metrics)

    def _held_out(self, samples: Array, batch: int) -> list[Array]:
        """Micro-batches of all held-out samples; full ones alone where the model runs with no other number of
        rows. UsageError where these are none."""
        batches = held_out_batches(samples, batch, self.floors.batch)
        if not all(self._evaluator_of(len(each)) for each in batches):
            batches = [each for each in held_out_batches(samples, batch, batch) if len(each) == batch]
        if not batches:
            raise UsageError(
                f"{len(samples)} held-out samples are fewer than a micro-batch of {batch}, and the model "
                "cannot be evaluated with them; raise the job's held_out, or make its micro-batch smaller"
            )
        return batches

    def _evaluator_of(self, rows: int) -> Executor | None:
        """What evaluates so many rows; None where that cannot be, or would take data home."""
        if self._evaluator is None or rows == self._evaluator.program.rows:
            return self._evaluator
        if rows not in self._at_rows:
            try:
                self._at_rows[rows] = self._made_for(self._evaluator.program, rows)
            except AtollError:
                self._at_rows[rows] = None
        return self._at_rows[rows]

    def _made_for(self, evaluation: StageProgram, rows: int) -> Executor:
        program, inputs = at_rows(evaluation, rows), inputs_at(self.model.inputs, rows)
        metas, precision = self.model.metas(), self.training.precision
        for _, node in program.ops:
            check_node(node, MAX_OUTPUT_BYTES)
        check_rows(program, inputs, metas, self.floors)
        costs = rehearse(program, metas, inputs, precision, self.device)
        executor = self._executor(program, differentiate=False)
        self._made(executor, costs)
        return executor

    # ---------------------------------------------------------------- tensors

    def _executor(self, program: StageProgram, *, differentiate: bool) -> Executor:
        training = self.training
        executor = Executor(
            program,
            self.device,
            training.precision,
            training.seed,
            keeping=replace(training.keeping.decided, saved_on=Place.DEVICE),
            differentiate=differentiate,
        )
        executor.load(self._work.values, self._frozen if differentiate else ())
        return executor

    def _begin(self, start: Arrays, carried: Collection[str] = ()) -> None:
        """Begin with these tensors and no optimizer state."""
        self._work.begin(start, carried)
        self._refresh()
        self._forget()

    def _refresh(self) -> None:
        for executor in (self._trainer, self._evaluator, *self._at_rows.values()):
            if executor is not None:
                executor.refresh()

    def _kept(self, done: Done) -> Done:
        return replace(done, weights=self._work.kept(done.weights))

    def _forget(self) -> None:
        """Free gradients and optimizer state: the answer is made in their memory."""
        self._trainer.reset()
        self._trainer.zero_gradients()
        for parameter in self._parameters.values():
            parameter.grad = None
        if self._optimizer is not None:
            self._optimizer.state.clear()
