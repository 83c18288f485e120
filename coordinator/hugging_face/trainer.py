"""A Trainer of transformers whose ``train()`` is a job on workers, and jobs made of its arguments.

All but the steps themselves is transformers' own: collating, columns, counting steps, weight decay's
parameters, logs, ``evaluate``, ``save_model``. What would change the steps on this machine alone is refused.
"""

from __future__ import annotations

import inspect
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import accelerate  # noqa: F401 - transformers' Trainer needs it, and says so late
import transformers
from transformers.trainer_utils import TrainOutput, has_length, speed_metrics

from atoll.arrays import array_of, tensor_of
from atoll.data import Rows
from atoll.errors import UsageError
from atoll.job import Job
from atoll.job_checks import MAX_NAME
from atoll.samples import drawn_anew
from coordinator.client.client import BEST, Client, check_ended, connect
from coordinator.client.export import fill
from coordinator.client.prepare import prepare
from coordinator.hugging_face.arguments import Length, check_arguments, order_of, training_of
from coordinator.hugging_face.models import loaded
from coordinator.hugging_face.resuming import note, resumed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sized

    from protos import atoll_control_pb2 as pb

log = transformers.utils.logging.get_logger(__name__)

MOST_DRAWS = 10
"""Of each sample, where the collator draws: as many masks as BERT was trained with in 40 epochs."""
NOT_HONOURED = ("compute_loss_func", "optimizer_cls_and_kwargs")
"""Arguments of a Trainer that only its own steps would read."""
OF_STEPS = (
    "compute_loss", "create_optimizer", "create_optimizer_and_scheduler", "create_scheduler",
    "get_decay_parameter_names", "get_train_dataloader", "training_step",
)  # fmt: skip
"""Methods of a Trainer that its own steps alone would call, but for how two of them are asked here."""
EVENTS = (
    "on_epoch_begin", "on_epoch_end", "on_evaluate", "on_optimizer_step", "on_pre_optimizer_step", "on_save",
    "on_step_begin", "on_step_end", "on_substep_end",
)  # fmt: skip
"""Events that do not take place on this machine while workers train."""


class Trainer(transformers.Trainer):
    """transformers' Trainer, but that ``train()`` has workers take the steps.

    The coordinator is the one of ``ATOLL_COORDINATOR`` and ``ATOLL_TOKEN``, or the one that has its state in
    ``ATOLL_STATE`` or the default folder. Samples are collated at submit, so each has the length of the
    longest. UsageError names each argument that workers would not honour.
    """

    def __init__(self, model: Any = None, args: Any = None, *more: Any, **others: Any) -> None:
        if args is not None:
            check_arguments(args)  # before transformers act on them
        super().__init__(loaded(model), args, *more, **others)
        self._an_epoch = 1  # steps
        given = inspect.signature(transformers.Trainer).bind(model, args, *more, **others).arguments
        self._check(given.get("callbacks") or ())

    def _check(self, callbacks: Iterable[Any]) -> None:
        """UsageError for what the steps of workers would not be asked for."""
        odd = [name for name in NOT_HONOURED if getattr(self, name) is not None]
        if self.optimizer is not None or self.lr_scheduler is not None:
            odd.append("optimizers")
        odd += [name for name in OF_STEPS if getattr(type(self), name) is not getattr(Trainer, name)]
        odd += [
            f"callbacks: {kind.__name__}.{event}"
            for kind in (one if isinstance(one, type) else type(one) for one in callbacks)
            for event in EVENTS
            if getattr(kind, event).__qualname__.partition(".")[0] != "TrainerCallback"
        ]
        if isinstance(self.eval_dataset, dict) and self.args.eval_strategy != "no":
            odd.append("eval_dataset: several, with an eval_strategy")
        if odd:
            raise UsageError(
                f"workers do not honour these of a Trainer: {'; '.join(odd)}; leave them out, or train on "
                "this machine with transformers.Trainer"
            )

    def job(self) -> Job:
        """Return what ``train()`` submits, for a job file."""
        train = self.get_train_dataloader()
        held: Any = None
        if self.eval_dataset is not None and not isinstance(self.eval_dataset, dict):
            held = self.get_eval_dataloader().dataset
        for name, one in (("train_dataset", train.dataset), ("eval_dataset", held)):
            if one is not None and not has_length(one):
                raise UsageError(
                    f"{name} has no length: workers need samples by number; give a map-style one"
                )
        counted = self.set_initial_training_values(self.args, train)
        self._an_epoch, batch = counted[1], self.args.train_batch_size
        # Masks that the collator draws are others in each epoch, as far as there is room for them.
        anew = drawn_anew("train_dataset", train.dataset, (), train.collate_fn)
        epochs = -(-counted[-1] // max(1, self._an_epoch))
        rows = Rows.of(
            train.dataset,
            held_out=held,
            seed=order_of(self.args),
            collate=train.collate_fn,
            reads=max(1, min(epochs, MOST_DRAWS)) if anew else 1,
        )
        examples = {name: tensor_of(array_of(name, array[:batch])) for name, array in rows.arrays.items()}
        # All of it, as transformers' own steps: a base of peft is in evaluation mode, its adapters are not.
        model = self._model().to("cpu").train()
        return Job(
            model,
            examples,
            rows,
            training_of(
                self.args,
                Length(steps=counted[-1], an_epoch=self._an_epoch),
                set(self.get_decay_parameter_names(model)),
                [name for name, parameter in model.named_parameters() if parameter.requires_grad],
                -(-len(held) // batch) if held is not None else 0,
            ),
            name=(self.args.run_name or Path(str(self.args.output_dir)).name or "trainer")[:MAX_NAME],
        )

    def train(
        self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> TrainOutput:
        """Train on workers until the job ends; the model then has its weights, with
        ``load_best_model_at_end`` those of the best held-out loss.

        ``resume_from_checkpoint``: True to go on with the last job that was submitted for ``output_dir``, or
        a job's name. JobFailed where it does not finish, and what ``prepare`` and ``connect`` raise.
        """
        if trial is not None:
            raise UsageError("train() takes no trial; search for settings with transformers.Trainer")
        made, folder = self.job(), Path(str(self.args.output_dir))
        with _connected() as client:
            if resume_from_checkpoint:
                job = resumed(client, resume_from_checkpoint, folder, made)
            else:
                job = client.submit(prepare(made)).job
            note(folder, job, made)
            found = self._follow(client, job, made)
            model = self._model()
            wanted, step = _trained(model), BEST if self.args.load_best_model_at_end else None
            fill(model, client.weights(job, wanted=wanted, step=step).tensors, wanted)
        model.to(self.args.device)
        return found

    def _model(self) -> Any:
        return self.model

    def _follow(self, client: Client, job: str, made: Job) -> TrainOutput:
        """Show what workers report as transformers' own steps would; returns when the job has ended."""
        training, started_s = made.training, time.time()
        samples_a_step = training.n_micro * self.args.train_batch_size
        of_epoch = samples_a_step / len(cast("Sized", self.train_dataset))
        state: Any = transformers.TrainerState(max_steps=training.steps)
        state.train_batch_size = self.args.train_batch_size
        state.compute_steps(self.args, training.steps)
        self.state = state
        self.control = self.callback_handler.on_train_begin(self.args, state, self.control)
        losses: list[float] = []
        since, shown = 0, ""
        for update in client.watch(job):
            if update.reason and shown != (shown := f"{job} {update.state}: {update.reason}"):
                log.warning(shown)
            for step, name, value in _points(update):
                if name == "eval_loss":
                    self._log_of(step, {name: value}, of_epoch)
                    continue
                if step <= state.global_step:
                    continue  # done again after a loss: what was logged stays
                losses.append(value)
                state.global_step, state.epoch = step, step * of_epoch
                self.control = self.callback_handler.on_step_end(self.args, state, self.control)
                if step % self._an_epoch == 0 or step == training.steps:
                    self.control = self.callback_handler.on_epoch_end(self.args, state, self.control)
                if self.control.should_log:
                    mean = sum(losses[since:]) / (len(losses) - since)
                    since = len(losses)
                    self.log({"loss": mean, "learning_rate": training.learning_rate(step - 1)})
        check_ended(update)
        state.global_step = max(state.global_step, update.step)  # of a job that had ended before
        if update.HasField("best_eval_loss"):
            state.best_metric, state.best_global_step = update.best_eval_loss, update.best_checkpoint
            if self.args.load_best_model_at_end and update.best_step != update.best_checkpoint:
                log.warning(
                    f"{job}: the best held-out loss is that of step {update.best_step}; the model has the "
                    f"weights of step {update.best_checkpoint}, the nearest that were stored"
                )
        mean = sum(losses) / max(1, len(losses))
        speeds: Any = speed_metrics
        total = training.steps * samples_a_step
        metrics = speeds("train", started_s, num_samples=total, num_steps=training.steps)
        metrics["train_loss"] = mean
        self.log(dict(metrics))
        self.control = self.callback_handler.on_train_end(self.args, state, self.control)
        return TrainOutput(state.global_step, mean, metrics)

    def _log_of(self, step: int, logs: dict[str, float], of_epoch: float) -> None:
        """Log figures of a step that workers may be beyond by now."""
        now = self.state.global_step, self.state.epoch
        self.state.global_step, self.state.epoch = step, step * of_epoch
        self.log(logs)
        self.state.global_step, self.state.epoch = now


def job(
    model: Any,
    dataset: Any,
    training: Any = None,
    *,
    eval_dataset: Any = None,
    data_collator: Any = None,
    processing_class: Any = None,
) -> Job:
    """Return the job of a model, or of a folder of transformers or peft, on a map-style data set.

    ``training``: TrainingArguments. UsageError names what workers would not honour.
    """
    return Trainer(
        model,
        training,
        data_collator=data_collator,
        train_dataset=dataset,
        eval_dataset=eval_dataset,
        processing_class=processing_class,
    ).job()


def _connected() -> Client:
    """Return a client of the coordinator that the `atoll` command would call."""
    given = os.environ.get
    state = given("ATOLL_STATE")
    return connect(given("ATOLL_COORDINATOR"), given("ATOLL_TOKEN"), Path(state) if state else None)


def _trained(model: Any) -> frozenset[str]:
    """Return the names of the tensors that training changes."""
    still = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return frozenset(model.state_dict()) - still


def _points(update: pb.JobUpdate) -> list[tuple[int, str, float]]:
    """Return (step, name, value) of losses and held-out losses, in their order."""
    names = ("loss", "eval_loss")
    found = [(point.step, point.name, point.value) for point in update.metrics if point.name in names]
    return sorted(found, key=lambda point: (point[0], names.index(point[1])))
