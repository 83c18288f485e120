"""The variant that runs Atoll's rules: `--run-config 'strategy="atoll.scaffold"'`.

Some rules need a net of their own: FedBN one with batch normalisation; VHL, FedImpro and MOON wrap it in
their loss. All others train the same model as the plain app.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from torch import Tensor, nn

from strategies.flower import LocalWork, correct, evaluation_arrays, local_round
from strategies.values import Done

from . import task

if TYPE_CHECKING:
    from flwr.app import UserConfig

    from strategies.layout import Array

PREFIX = "atoll."
CHANGE_LOSS = ("vhl", "fedimpro", "moon")
OF_ADAPTERS = ("fedsvd", "flora")


class Adapted(nn.Module):
    """A frozen layer and what is trained beside it, under peft's names."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapted: torch.Tensor = self.base_layer(x) + self.lora_B(self.lora_A(x))
        return adapted


def rule_of(run_config: UserConfig) -> str:
    """The rule by name, "" where the run uses Flower's own strategies."""
    name = str(run_config["strategy"])
    return name.removeprefix(PREFIX) if name.startswith(PREFIX) else ""


def make_model(run: UserConfig) -> nn.Module:
    """The plain app's model, or what the run's rule makes of it."""
    rule, seed, hidden = rule_of(run), int(run["seed"]), int(run["hidden"])
    if rule not in ("fedbn", *CHANGE_LOSS, *OF_ADAPTERS):
        return task.make_model(seed, hidden)
    torch.manual_seed(seed)
    below, head = nn.Linear(64, hidden), nn.Linear(hidden, task.CLASSES)
    if rule in OF_ADAPTERS:
        return nn.Sequential(Adapted(below), nn.ReLU(), head)
    if rule == "fedbn":
        return nn.Sequential(below, nn.BatchNorm1d(hidden), nn.ReLU(), head)
    return _wrapped(rule, nn.Sequential(nn.Flatten(), below, nn.ReLU(), head))


def _wrapped(rule: str, net: nn.Module) -> nn.Module:
    """``net`` in a rule's loss; its layer "1" is the hidden one, "3" the head."""
    if rule == "vhl":
        from strategies.vhl_module import Vhl, VhlLoss
        from strategies.virtual_data import VirtualSpec

        virtual = VirtualSpec(seed=7, classes=task.CLASSES, per_class=20, shape=(1, 8, 8), base=4)
        return Vhl(net, "3", virtual, VhlLoss(batch=task.BATCH, pad=1, flip=False))
    if rule == "fedimpro":
        from strategies.fedimpro_module import FedImpro

        return FedImpro(net, "2", task.CLASSES, torch.zeros(2, 1, 8, 8))
    from strategies.moon_module import Moon

    return Moon(net, "3")


def net_of(model: nn.Module) -> nn.Module:
    """What gives logits."""
    inner = getattr(model, "net", None)
    return inner if isinstance(inner, nn.Module) else model


def arrays_of(model: nn.Module) -> dict[str, Array]:
    """The state dict in numpy."""
    return {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}


def load(model: nn.Module, arrays: dict[str, Array]) -> None:
    """Set tensors by name; those not given stay."""
    model.load_state_dict({n: torch.from_numpy(a) for n, a in arrays.items()}, strict=False)


def train(message: Message, context: Context, data: tuple[Tensor, Tensor]) -> Message:
    """One round under the rule that the server names."""
    config, rule = context.run_config, rule_of(context.run_config)
    data = _shaped(rule, data)

    def local(work: LocalWork) -> Done:
        model = make_model(config)
        load(model, work.start)
        correction = work.correction.mapped(torch.from_numpy)
        start_loss, _ = task.evaluate(net_of(model), data)
        # Random draws inside a loss follow from the round, as the order of samples does.
        seed = int(work.config["server-round"])
        torch.manual_seed(seed)
        loss, steps = task.train(
            model.train(),
            data,
            epochs=int(config["local-epochs"]),
            lr=float(config["lr"]),
            seed=seed,
            loss_of=model if rule in CHANGE_LOSS else None,
            at_epoch=lambda epoch: load(model, dict(work.at_epoch(epoch))),
            before_step=lambda: correct(model, correction),
        )
        return Done(
            arrays_of(model),
            len(data[0]),
            steps,
            float(config["lr"]),
            start_loss=start_loss,
            metrics={"train_loss": loss},
        )

    model = make_model(config)
    return local_round(message, context, arrays_of(model), local, seed=int(config["seed"]))


def evaluate(message: Message, context: Context, data: tuple[Tensor, Tensor]) -> Message:
    """The common model, or under some rules the client's own, on this client's data."""
    rule = rule_of(context.run_config)
    model = make_model(context.run_config)
    load(model, evaluation_arrays(message, context, arrays_of(model)))
    loss, accuracy = task.evaluate(net_of(model.train(False)), _shaped(rule, data))
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(data[0])})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def central(rule: str, model: nn.Module, data: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """(loss, accuracy) on the server's data."""
    return task.evaluate(net_of(model.train(False)), _shaped(rule, data))


def _shaped(rule: str, data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Images for rules that make images of their own, else rows of pixels."""
    return (data[0].reshape(-1, 1, 8, 8), data[1]) if rule in CHANGE_LOSS else data
