"""How people build models: shared and frozen weights, adapters, groups, state that travels, odd tensors."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from atoll.job import Optimizer, OptimizerName, ParamGroup, Schedule, ScheduleKind
from tests.models import bert, gpt2, llama, token_batch
from tests.parameters import sampled
from tests.people.loop import Case, case, goes_on, job_of, run

ADAMW = Optimizer(OptimizerName.ADAMW, lr=1e-3, weight_decay=0.1)


def rows() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(5)
    return {"x": torch.randn(32, 6, generator=g), "y": torch.randint(0, 4, (32,), generator=g)}


def tokens() -> dict[str, Tensor]:
    batches = [token_batch(seed) for seed in range(16)]
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def masked_tokens() -> dict[str, Tensor]:
    found = tokens()
    return {**found, "attention_mask": torch.ones_like(found["input_ids"])}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return F.cross_entropy(self.c(torch.tanh(self.b(torch.tanh(self.a(x))))), y)


class Repeated(Net):
    """One layer used several times, as Albert does."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        hidden = torch.tanh(self.a(x))
        for _ in range(3):
            hidden = hidden + torch.tanh(self.b(hidden))
        return F.cross_entropy(self.c(hidden), y)


def reaches_itself() -> nn.Module:
    """A forward in a closure over the module, which a copy of the module shares."""
    net = Net()
    net.forward = lambda x, y: F.cross_entropy(net.c(net.b(net.a(x))), y)  # type: ignore[method-assign]
    return net


def patched_forward() -> nn.Module:
    net = Net()
    net.forward = types.MethodType(Repeated.forward, net)  # type: ignore[method-assign]
    return net


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.d = nn.Linear(8, 8)
        self.d.weight = self.b.weight

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return F.cross_entropy(self.c(self.d(torch.tanh(self.b(self.a(x))))), y)


class TiedTransposed(Net):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        hidden = torch.tanh(self.b(torch.tanh(self.a(x))))
        return F.cross_entropy(self.c(hidden + F.linear(hidden, self.b.weight.t())), y)


class SharedByViews(Net):
    """Two parameters on one memory, which would part ways."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.randn(2, 8)
        self.one, self.two = nn.Parameter(both[0]), nn.Parameter(both.view(-1)[4:12])

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return F.cross_entropy(self.c(torch.tanh(self.a(x) * self.one + self.two)), y)


class ChunkedBefore(Net):
    """Views of a parameter made once: they change with it, and their gradients are its own."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.randn(16, 8) * 0.3)
        self.q, self.k = self.qk[:8], self.qk[8:]

    def forward(self, x: Tensor, y: Tensor) -> Any:
        hidden = torch.tanh(self.a(x))
        return F.cross_entropy(self.c((hidden @ self.q) * (hidden @ self.k)), y)


class DetachedBefore(Net):
    """The weight of a layer without its gradient, as it is at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.known = [self.b.weight.detach()]

    def forward(self, x: Tensor, y: Tensor) -> Any:
        hidden = torch.tanh(self.b(torch.tanh(self.a(x))))
        return F.cross_entropy(self.c(hidden @ self.known[0]), y)


class InNumpy(DetachedBefore):
    def __init__(self) -> None:
        super().__init__()
        array = self.b.weight.detach().numpy()
        self.known = [torch.from_numpy(array)]


class FrozenBefore(DetachedBefore):
    """Of what does not change, a view is as good as the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.b.requires_grad_(False)


class BufferBefore(Net):
    level: Tensor

    def __init__(self, moves: bool = True) -> None:
        super().__init__()
        self.register_buffer("level", torch.ones(8))
        self.row, self.moves = self.level[None], moves

    def forward(self, x: Tensor, y: Tensor) -> Any:
        hidden = torch.tanh(self.a(x))
        if self.moves:
            self.level.lerp_(hidden.detach().mean(0), 0.1)
        return F.cross_entropy(self.c(hidden * self.row + self.level), y)


def still_buffer_before() -> nn.Module:
    return BufferBefore(moves=False)


class WeighsClasses(Net):
    """Weights of classes in a plain attribute, picked by the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.tensor([0.25, 0.25, 0.3, 0.2])

    def forward(self, x: Tensor, y: Tensor) -> Any:
        chosen = self.c(self.a(x)).log_softmax(1).gather(1, y[:, None])[:, 0]
        return (-self.weights[y] * (1 - chosen.exp()).square() * chosen).mean()


class Strided(Net):
    """A parameter that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8).t())

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return F.cross_entropy(self.c(torch.tanh(self.a(x)) @ self.w), y)


class Listed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(8)) for _ in range(2)])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.zeros(8))})

    def forward(self, x: Tensor, y: Tensor) -> Any:
        hidden = torch.tanh(self.a(x)) * self.scales[0] * self.scales[1] + self.named["shift"]
        return F.cross_entropy(self.c(hidden), y)


class Unregistered(Net):
    """Parameters in a plain list: no optimizer sees them, in a plain loop neither."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [torch.randn(8, 8)]

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return F.cross_entropy(self.c(torch.tanh(self.a(x)) @ self.hidden[0]), y)


class UnregisteredParameter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scales = [nn.Parameter(torch.ones(8))]

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return F.cross_entropy(self.c(torch.tanh(self.a(x)) * self.scales[0]), y)


class UnregisteredLayers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(8, 8)]

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return F.cross_entropy(self.c(self.layers[0](torch.tanh(self.a(x)))), y)


class Unused(Net):
    """Parameters that no loss uses: weight decay does not touch them in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.d = nn.Linear(3, 3)


class OnlyDetached(Net):
    """Parameters in use, without a gradient: torch leaves them as they are, weight decay included."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        hidden = torch.tanh(self.a(x))
        return F.cross_entropy(self.c(hidden + self.b(hidden).detach()), y)


class OnlyWithoutGradient(Net):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        hidden = torch.tanh(self.a(x))
        with torch.no_grad():
            offset = self.b(hidden)
        return F.cross_entropy(self.c(hidden + offset), y)


class Lora(Net):
    def __init__(self) -> None:
        super().__init__()
        self.b.requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        hidden = torch.tanh(self.a(x))
        return F.cross_entropy(self.c(torch.tanh(self.b(hidden) + self.up(self.down(hidden)))), y)


def peft_of_gpt2() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.0, fan_in_fan_out=True)
    model = get_peft_model(gpt2(layers=1).module, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)  # zeros would give half the adapters no gradient at first
    return model


def gpt2_with_checkpointing() -> nn.Module:
    module = gpt2(layers=1).module
    module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore
    return module


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


def parametrized() -> nn.Module:
    net = Net()
    parametrize.register_parametrization(net.b, "weight", Symmetric())
    return net


class Ema(Net):
    """A teacher as buffers, moved in forward, and a centre of its outputs."""

    teacher: Tensor
    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("teacher", self.a.weight.detach().clone())
        self.register_buffer("centre", torch.zeros(8))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        hidden = torch.tanh(self.a(x))
        with torch.no_grad():
            if self.training:
                self.teacher.mul_(0.9).add_(self.a.weight, alpha=0.1)
            target = torch.tanh(F.linear(x, self.teacher)) - self.centre
            if self.training:
                self.centre.mul_(0.9).add_(target.mean(0), alpha=0.1)
        return F.cross_entropy(self.c(hidden), y) + F.mse_loss(hidden, target)


class Double(Net):
    def __init__(self) -> None:
        super().__init__()
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return super().forward(x.double(), y)


class SixteenBits(Net):
    """Trained in 16 bits, with parameters longer than a vector of them."""

    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return super().forward(x.bfloat16(), y)


class Chooses(Net):
    """Another loss where there are no labels: the graph has the branch that the job takes."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        return {"logits": self.a(x), "loss": None if y is None else super().forward(x, y)}


class RenamesItsState(Net):
    """Hooks on its state dict: trained under its own names all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(self.rename)

    @staticmethod
    def rename(module: nn.Module, state: dict[str, Any], prefix: str, meta: Any) -> None:
        for key in [key for key in state if key.startswith("a.")]:
            state[f"old.{key}"] = state.pop(key)


def lazy() -> nn.Module:
    net = Net()
    net.a = nn.LazyLinear(8)
    return net


class Prints(Net):
    """Prints and warns: harmless."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        import logging

        logging.getLogger("net").debug("shape %s", x.shape)
        return super().forward(x, y)


class RetainsGradient(Net):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        hidden = torch.tanh(self.a(x))
        if hidden.requires_grad:
            hidden.retain_grad()
        return F.cross_entropy(self.c(hidden), y)


class Labelled(Tensor):
    """A tensor of the owner's own class."""


class SubclassParameter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8).as_subclass(Labelled))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return F.cross_entropy(self.c(torch.tanh(self.a(x)) * self.scale), y)


class HookedOutput(Net):
    """A forward hook that changes a value, a pre-hook that changes an input: part of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.b.register_forward_hook(lambda module, args, out: out * 0.5)
        self.c.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


class OwnAutocast(Net):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            return super().forward(x, y)


class SoftTargets(Net):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return F.cross_entropy(self.c(self.a(x)), F.one_hot(y, 4).float() * 0.9 + 0.025)


class Contrastive(Net):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        one, two = F.normalize(self.a(x), dim=-1), F.normalize(self.b(self.a(x)), dim=-1)
        return F.cross_entropy(one @ two.T / 0.1, torch.arange(len(x)))


class MakesWithOut(Net):
    """New tensors in the place, and type, of others, as peft's AdaLoRA makes its identity."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        identity = torch.empty(8, 8, dtype=torch.float64)
        torch.eye(8, 8, out=identity)
        steps = torch.empty(8, dtype=torch.float64)
        torch.linspace(0.1, 0.7, 8, out=steps)
        off = (self.a.weight @ self.a.weight.T - identity.float()).norm()
        return super().forward(x, y) + 0.1 * off + (steps.float() * self.a.bias).sum()


class Triplet(Net):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        hidden = self.a(x)
        return F.triplet_margin_loss(hidden, hidden.roll(1, 0), hidden.roll(2, 0)) + super().forward(x, y)


CASES = [
    case(Repeated, rows),
    case(Tied, rows),
    case(TiedTransposed, rows),
    case(reaches_itself, rows, refused="forward reaches the job's own module.*give it self"),
    case(patched_forward, rows),
    case(SharedByViews, rows, refused="different tensors on the same memory"),
    case(ChunkedBefore, rows, refused="a view of 'qk' that was made before.*take the view in"),
    case(DetachedBefore, rows, refused=r"a view of 'b\.weight'"),
    case(InNumpy, rows, refused=r"a view of 'b\.weight'"),
    case(FrozenBefore, rows),
    case(BufferBefore, rows, refused="a view of 'level'"),
    case(still_buffer_before, rows),
    case(WeighsClasses, rows),
    case(Strided, rows),
    case(Listed, rows),
    case(Unregistered, rows),
    case(UnregisteredParameter, rows),
    case(UnregisteredLayers, rows),
    case(Unused, rows, optimizer=ADAMW),
    case(OnlyDetached, rows, optimizer=ADAMW),
    case(OnlyWithoutGradient, rows, optimizer=ADAMW),
    case(Lora, rows),
    case(parametrized, rows),
    case(Ema, rows),
    case(Double, rows),
    case(SixteenBits, rows, optimizer=Optimizer(OptimizerName.SGD, lr=0.05, momentum=0.9)),
    case(Chooses, rows),
    case(RenamesItsState, rows),
    case(lazy, rows, refused="has no size yet; call the module once"),
    case(Prints, rows),
    case(RetainsGradient, rows),
    case(SubclassParameter, rows, refused="cannot be copied to be checked.*subclass"),
    case(HookedOutput, rows),
    case(OwnAutocast, rows),
    case(SoftTargets, rows),
    case(Contrastive, rows),
    case(Triplet, rows),
    case(MakesWithOut, rows),
    case(
        Net,
        rows,
        name="groups, frozen ones, warm-up, cosine, momentum and clipping",
        steps=5,
        optimizer=Optimizer(
            OptimizerName.SGD, 0.1, 0.01, momentum=0.9, nesterov=True, clip_norm=0.5,
            groups=(ParamGroup(("a.*",), 0.1, 0.0), ParamGroup(("b.bias",), frozen=True)),
        ),
        schedule=Schedule(ScheduleKind.COSINE, warmup_steps=2),
    ),
]  # fmt: skip


TRANSFORMERS = [
    case(peft_of_gpt2, tokens),
    case(gpt2_with_checkpointing, tokens),
    case(lambda: llama(layers=1).module, tokens, name="llama"),
    case(lambda: bert(layers=1).module, masked_tokens, name="bert"),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_a_model_of_transformers_is_trained_as_in_a_plain_loop(kind: Case, one_thread: None) -> None:
    run(kind)


@pytest.mark.parametrize("kind", sampled(15, CASES))
def test_a_model_is_trained_however_it_is_built(kind: Case, one_thread: None) -> None:
    run(kind)


@pytest.mark.parametrize("kind", [SixteenBits, Double])
@pytest.mark.parametrize("optimizer", [Optimizer(OptimizerName.SGD, lr=0.05, momentum=0.9), ADAMW])
def test_parameters_of_other_types_go_on_bit_for_bit(
    kind: type[Net], optimizer: Optimizer, one_thread: None
) -> None:
    assert goes_on(lambda: job_of(kind(), rows(), optimizer=optimizer, steps=4), 2)
