"""Every wrong input that people bring, and what `atoll submit` answers: the table of docs/wrong-inputs.md.

    python -m tests.people.wrong_inputs    # writes the page again

A case is what is wrong in words and a few lines of a job file: keyword arguments of ``Job`` that replace
those of ``TEMPLATE``, and statements before. ``answer`` runs the real command on it.
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from coordinator.cli.main import app
from hostos import command_line
from protos import atoll_control_pb2 as pb
from tests.coordinator.client.fake_owner import FakeOwnerServer, Script

PAGE = Path(__file__).resolve().parents[2] / "docs" / "wrong-inputs.md"
TEMPLATE = """
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from atoll import *

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x, y):
        return F.cross_entropy(self.head(torch.tanh(self.body(x))), y)

X = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(40) % 4
SET = TensorDataset(X, Y)
EXAMPLE = {{"x": torch.zeros(4, 8), "y": torch.zeros(4, dtype=torch.long)}}
{setup}
def job():
    given = dict(module=Net(), example_inputs=EXAMPLE, data=Rows({{"x": X, "y": Y}}),
                 training=TrainingSpec(steps=8, n_micro=4), name="wrong")
    return Job(**given | dict({change}))
"""
# As those of polars answer: a row of a frame is a frame, and a lazy one has no values before collect().
FRAME = """
class DataFrame:
    columns, dtypes, shape = ["x", "y"], ["f8", "i8"], (40, 2)
    def __len__(self):
        return 40
    def __getitem__(self, row):
        return DataFrame()
    def __array__(self, *form, **options):
        return np.zeros((1, 2))
"""
LAZY_FRAME = """
class LazyFrame:
    columns, dtypes = ["x", "y"], ["f8", "i8"]
    def collect(self):
        return self
"""


@dataclass(frozen=True)
class Case:
    """A wrong input: its name, arguments of ``Job`` that replace the template's, statements before ``job()``,
    and options of the command."""

    name: str
    change: str = ""
    setup: str = ""
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What a person sees: the exit code, and the error without the job file's path and line."""

    code: int
    message: str


def model(forward: str, init: str = "self.fc = nn.Linear(8, 4)") -> str:
    """Return statements that define ``Net`` anew."""
    return f"""class Net(nn.Module):
    def __init__(self):
        super().__init__()
        {init}
    def forward(self, x, y):
        {forward}"""


def does(first: str = "pass", *, scale: str = "1.0", init: str = "pass", before: str = "") -> str:
    """Return statements that define ``Net`` as a model that does something else beside."""
    return (
        before
        + "\n"
        + model(
            f"{first}\n        return F.cross_entropy(self.fc(x), y) * ({scale})",
            f"self.fc = nn.Linear(8, 4)\n        {init}",
        )
    )


JOBS = (
    Case("a class in place of the module", "module=Net"),
    Case("a function in place of the module", "module=lambda x, y: 0"),
    Case("a model's name in place of the module", "module='gpt2'"),
    Case("no module", "module=None"),
    Case("a state dict in place of the module", "module=Net().state_dict()"),
    Case(
        "a module without `forward`",
        "module=Steps()",
        "class Steps(nn.Module):\n    def training_step(self, x, y):\n        return 0",
    ),
    Case("a module under `torch.compile`", "module=torch.compile(Net())"),
    Case("a module inside `DataParallel`", "module=nn.DataParallel(Net())"),
    Case("no training", "training=None"),
    Case("a number in place of the training", "training=3"),
    Case("an optimizer in place of the training", "training=torch.optim.SGD(Net().parameters(), lr=0.1)"),
    Case("a metric's name without a tuple", "metrics='accuracy'"),
    Case("a job without a name", "name=''"),
    Case("a strategy's name in place of the federation", "federated='fedavg'"),
    Case("an argument that `Job` does not have", "model=Net()"),
    Case("`job()` returns something else", setup="def job():\n    return Net()", options=()),
    Case("`job()` raises", setup="def job():\n    return {}['lr']"),
    Case("a file with a syntax error", setup="def job(:"),
    Case("a library that is not installed", setup="import a_library_that_is_not_there"),
)

EXAMPLES = (
    Case("a tensor in place of example inputs", "example_inputs=EXAMPLE['x']"),
    Case("a tuple in place of example inputs", "example_inputs=tuple(EXAMPLE.values())"),
    Case("a list in place of example inputs", "example_inputs=list(EXAMPLE.values())"),
    Case("no example inputs", "example_inputs={}"),
    Case("an example input that is a numpy array", "example_inputs=EXAMPLE | {'x': np.zeros((4, 8))}"),
    Case("an example input that is a number", "example_inputs=EXAMPLE | {'y': 3}"),
    Case("an example input that is a dict", "example_inputs={'batch': EXAMPLE}"),
    Case("an example input under a wrong name", "example_inputs={'inputs': EXAMPLE['x'], 'y': EXAMPLE['y']}"),
    Case("an argument of `forward` without an example input", "example_inputs={'x': EXAMPLE['x']}"),
    Case("example inputs of several batch sizes", "example_inputs=EXAMPLE | {'x': torch.zeros(3, 8)}"),
    Case("an example input without a batch", "example_inputs=EXAMPLE | {'y': torch.tensor(1)}"),
    Case(
        "an example input of a type that no op takes",
        "example_inputs=EXAMPLE | {'x': torch.zeros(4, 8).to(torch.float8_e5m2)}",
    ),
    Case(
        "an example input on a device without values",
        "example_inputs=EXAMPLE | {'x': torch.zeros(4, 8, device='meta')}",
    ),
)

DATA = (
    Case("a `DataLoader`", "data=DataLoader(SET, batch_size=4)"),
    Case("a `TensorDataset`", "data=SET"),
    Case(
        "a data set that streams",
        "data=Stream()",
        "class Stream(IterableDataset):\n    def __iter__(self):\n        yield 1",
    ),
    Case("a dict", "data={'x': X, 'y': Y}"),
    Case("a list", "data=[X, Y]"),
    Case("a tensor", "data=X"),
    Case("an array", "data=X.numpy()"),
    Case(
        "a data frame",
        "data=DataFrame()",
        "DataFrame = type('DataFrame', (), {'__module__': 'pandas.core.frame'})",
    ),
    Case("a data frame of polars", "data=DataFrame()", FRAME),
    Case("a data frame that is lazy", "data=LazyFrame()", LAZY_FRAME),
    Case("a path", "data='data.csv'"),
    Case("a generator", "data=(row for row in SET)"),
    Case("no data", "data=None"),
    Case("a class in place of the data", "data=Rows"),
    Case(
        "a `DataLoader` with weights and a collator",
        "data=DataLoader(SET, sampler=WeightedRandomSampler([1.0] * 40, 40), collate_fn=dict)",
        "from torch.utils.data import WeightedRandomSampler",
    ),
    Case(
        "a `DataLoader` with batches of its own",
        "data=DataLoader(SET, batch_sampler=Even(SequentialSampler(SET), 4, False))",
        "from torch.utils.data import BatchSampler, SequentialSampler\nclass Even(BatchSampler): pass",
    ),
    Case(
        "a `DataLoader` that streams",
        "data=DataLoader(Stream())",
        "class Stream(IterableDataset):\n    def __iter__(self):\n        yield 1",
    ),
    Case("a `DataLoader` in `Rows`", "data=Rows(DataLoader(SET))"),
    Case("a `TensorDataset` in `Rows`", "data=Rows(SET)"),
    Case("a list in `Rows`", "data=Rows([X, Y])"),
    Case("arrays of several lengths", "data=Rows({'x': X, 'y': Y[:39]})"),
    Case("no rows", "data=Rows({'x': X[:0], 'y': Y[:0]})"),
    Case("fewer rows than a micro-batch", "data=Rows({'x': X[:3], 'y': Y[:3]})"),
    Case("rows of several lengths", "data=Rows({'x': [[1.0, 2.0], [3.0]], 'y': [0, 1]})"),
    Case("tensors of several lengths", "data=Rows({'x': [X[0], X[1, :3]], 'y': [0, 1]})"),
    Case("objects", "data=Rows({'x': np.array([{}] * 40), 'y': Y})"),
    Case("text", "data=Rows({'x': ['a'] * 40, 'y': Y})"),
    Case(
        "a column of lists of several lengths",
        "data=Rows({'x': X, 'y': pd.Series([[1], [1, 2]] * 20)})",
        "import pandas as pd",
    ),
    Case(
        "a data frame of numbers and truth values",
        "data=Rows({'x': pd.DataFrame(X.numpy()).assign(more=Y.numpy() > 1), 'y': Y})",
        "import pandas as pd",
    ),
    Case("a column with a missing value", "data=Rows({'x': X, 'y': [0, None] * 20})"),
    Case(
        "a sparse matrix of scipy", "data=Rows({'x': scipy.sparse.eye(40, 8), 'y': Y})", "import scipy.sparse"
    ),
    Case(
        "a list of masked rows",
        "data=Rows({'x': [np.ma.masked_less(row, 0) for row in X.numpy()], 'y': Y})",
    ),
    Case(
        "a data frame in `Rows.of`",
        "data=Rows.of(pd.DataFrame({'x': [0.0], 'y': [0]}))",
        "import pandas as pd",
    ),
    Case("a data frame of polars in `Rows.of`", "data=Rows.of(DataFrame(), 'x')", FRAME),
    Case("a lazy data frame in `Rows.of`", "data=Rows.of(LazyFrame(), 'x', 'y')", LAZY_FRAME),
    Case("columns in `Rows.of`", "data=Rows.of({'x': X, 'y': Y})"),
    Case("dates", "data=Rows({'x': np.array(['2026-01-01'] * 40, 'datetime64[D]'), 'y': Y})"),
    Case("complex numbers", "data=Rows({'x': X.to(torch.complex64), 'y': Y})"),
    Case("a sparse tensor", "data=Rows({'x': X.to_sparse(), 'y': Y})"),
    Case("a number in place of an array", "data=Rows({'x': X, 'y': 3})"),
    Case("eight-bit floats", "data=Rows({'x': X.to(torch.float8_e5m2), 'y': Y})"),
    Case(
        "a tensor on a device without values", "data=Rows({'x': torch.zeros(40, 8, device='meta'), 'y': Y})"
    ),
    Case("an input that is missing in the data", "data=Rows({'x': X})"),
    Case("data under a wrong name", "data=Rows({'features': X, 'y': Y})"),
    Case("rows whose shape differs from the example's", "data=Rows({'x': X[:, :7], 'y': Y})"),
    Case("floats where the model takes integers", "data=Rows({'x': X, 'y': Y.float()})"),
    Case(
        "labels that wrap around",
        "data=Rows({'x': X, 'y': Y + 300})",
        "EXAMPLE['y'] = EXAMPLE['y'].to(torch.uint8)",
    ),
    Case(
        "a label in the last row that the loss has no class for",
        "data=Rows({'x': X, 'y': torch.where(torch.arange(40) == 39, 9, Y)})",
    ),
    Case("masked values", "data=Rows({'x': np.ma.masked_less(X.numpy(), 0), 'y': Y})"),
    Case(
        "nested tensors",
        "data=Rows({'x': torch.nested.nested_tensor([X[0], X[1, :3]], layout=torch.jagged), 'y': Y[:2]})",
    ),
    Case("a seed that is not a number", "data=Rows({'x': X, 'y': Y}, seed='a')"),
    Case(
        "images that are mirrored at random",
        "data=Rows.of(Mirrored(), 'x', 'y')",
        "class Mirrored(TensorDataset):\n    def __init__(self):\n        super().__init__(X, Y)\n"
        "    def __getitem__(self, at):\n        x, y = super().__getitem__(at)\n"
        "        return x.flip(0) if torch.rand(()) < 0.5 else x, y",
    ),
    Case("samples whose parts differ from the names", "data=Rows.of(SET, 'x')"),
    Case("a `DataLoader` in `Rows.of`", "data=Rows.of(DataLoader(SET), 'x', 'y')"),
    Case(
        "held-out data with a different shape",
        "data=Rows({'x': X, 'y': Y}, {'x': X[:, :7], 'y': Y}), training=TrainingSpec(8, 4, eval_batches=1)",
    ),
    Case("an evaluation without held-out data", "training=TrainingSpec(8, 4, eval_batches=1)"),
    Case(
        "a text shorter than a window",
        "example_inputs=dict.fromkeys('xy', EXAMPLE['y']), data=ByteText(64, 'x', b'short')",
    ),
    Case(
        "a user-defined source that returns nothing",
        "data=Mine()",
        "class Mine:\n    def materialise(self, batch):\n        return None",
    ),
    Case("a registered data set without clients", "data=Registered('digits', {'x': 'x', 'y': 'y'})"),
    Case("a federation with its owner's data", "federated=Federated()"),
    Case("labels for which the loss has no class", "data=Rows({'x': X, 'y': Y + 4})"),
    Case(
        "labels of a type that the loss does not accept", "example_inputs=EXAMPLE | {'y': EXAMPLE['y'].int()}"
    ),
)

TRAINING = (
    Case("half a step", "training=TrainingSpec(steps=2.5, n_micro=4)"),
    Case("a float for a number of steps", "training=TrainingSpec(steps=1e3, n_micro=4)"),
    Case("a string for a number of steps", "training=TrainingSpec(steps='8', n_micro=4)"),
    Case("fewer than one step", "training=TrainingSpec(steps=-1, n_micro=4)"),
    Case("no micro-batches", "training=TrainingSpec(steps=8, n_micro=0)"),
    Case("no number of micro-batches", "training=TrainingSpec(steps=8)"),
    Case("a negative seed", "training=TrainingSpec(8, 4, seed=-1)"),
    Case("a torch dtype for the precision", "training=TrainingSpec(8, 4, precision=torch.bfloat16)"),
    Case("an unknown precision", "training=TrainingSpec(8, 4, precision='fp16')"),
    Case(
        "torch's AdamW",
        "training=TrainingSpec(8, 4, optimizer=torch.optim.AdamW(Net().parameters(), lr=3e-4))",
    ),
    Case(
        "torch's Adam",
        "training=TrainingSpec(8, 4, optimizer=torch.optim.Adam(Net().parameters(), weight_decay=0.1))",
    ),
    Case(
        "torch's Muon",
        "training=TrainingSpec(8, 4, optimizer=torch.optim.Muon([torch.nn.Parameter(torch.ones(2, 2))]))",
    ),
    Case("the class of torch's SGD", "training=TrainingSpec(8, 4, optimizer=torch.optim.SGD)"),
    Case(
        "an optimizer that stages do not support",
        "training=TrainingSpec(8, 4, optimizer=torch.optim.RMSprop(Net().parameters()))",
    ),
    Case("an optimizer's name instead of an `Optimizer`", "training=TrainingSpec(8, 4, optimizer='sgd')"),
    Case("an unknown optimizer's name", "training=TrainingSpec(8, 4, optimizer=Optimizer('adagrad'))"),
    Case(
        "a torch scheduler",
        "training=TrainingSpec(8, 4, schedule=StepLR(torch.optim.SGD(Net().parameters()), 2))",
        "from torch.optim.lr_scheduler import StepLR",
    ),
    Case("a learning rate in quotes", "training=TrainingSpec(8, 4, optimizer=Optimizer(lr='1e-3'))"),
    Case("a negative learning rate", "training=TrainingSpec(8, 4, optimizer=Optimizer(lr=-0.1))"),
    Case(
        "a learning rate that is not a number",
        "training=TrainingSpec(8, 4, optimizer=Optimizer(lr=float('nan')))",
    ),
    Case("a learning rate for each step", "training=TrainingSpec(8, 4, optimizer=Optimizer(lr=[0.1, 0.01]))"),
    Case("one beta", "training=TrainingSpec(8, 4, optimizer=Optimizer(betas=0.9))"),
    Case("betas of 1", "training=TrainingSpec(8, 4, optimizer=Optimizer(betas=(0.9, 1.0)))"),
    Case(
        "Nesterov without momentum", "training=TrainingSpec(8, 4, optimizer=Optimizer('sgd', nesterov=True))"
    ),
    Case("clipping to a norm of 0", "training=TrainingSpec(8, 4, optimizer=Optimizer(clip_norm=0))"),
    Case(
        "a pattern that is not a tuple",
        "training=TrainingSpec(8, 4, optimizer=Optimizer(groups=(ParamGroup('head.*'),)))",
    ),
    Case(
        "a group without any parameter",
        "training=TrainingSpec(8, 4, optimizer=Optimizer(groups=(ParamGroup(('encoder.*',), frozen=True),)))",
    ),
    Case(
        "a group that uses the other name of a tied parameter",
        "module=TIED, training=TrainingSpec(8, 4, optimizer=Optimizer(groups=(ParamGroup(('head.*',)),)))",
        "TIED = Net()\nTIED.head = TIED.body",
    ),
    Case(
        "parameters in place of a group",
        "training=TrainingSpec(8, 4, optimizer=Optimizer(groups=[{'params': []}]))",
    ),
    Case(
        "a step schedule without its interval",
        "training=TrainingSpec(8, 4, schedule=Schedule('step', gamma=0.5))",
    ),
    Case("a negative warm-up", "training=TrainingSpec(8, 4, schedule=Schedule(warmup_steps=-5))"),
    Case("an unknown compression", "training=TrainingSpec(8, 4, compress='gzip')"),
    Case("a number for a true/false option", "training=TrainingSpec(8, 4, average_buffers=1)"),
    Case("more blocks than micro-batches", "training=TrainingSpec(8, 4, blocks=5)"),
    Case("an unknown field", options=("--set", "rate=1")),
    Case("a federation's field in a job without a federation", options=("--set", "federated.clients=5")),
)

MODELS = (
    Case("a model that returns its logits", setup=model("return self.fc(x)")),
    Case("a model that returns nothing", setup=model("F.cross_entropy(self.fc(x), y)")),
    Case("a model that raises an exception", setup=model("return self.fc(x.reshape(3, 5)).mean()")),
    Case("a model without parameters", setup=model("return x.mean()", "pass")),
    Case(
        "a model whose sizes are not known yet",
        setup=model("return F.cross_entropy(self.fc(x), y)", "self.fc = nn.LazyLinear(4)"),
    ),
    Case("a model on the meta device", "module=Net().to('meta')"),
    Case(
        "a model that computes a gradient itself",
        setup=model(
            "loss = F.cross_entropy(self.fc(x), y)\n"
            "        return loss + torch.autograd.grad(loss, self.fc.weight, create_graph=True)[0].norm()"
        ),
    ),
    Case(
        "a model that branches on a value",
        setup=model("return self.fc(x).mean() * (2 if x.sum() > 0 else 1)"),
    ),
)

STATE = (
    Case("counts its calls", setup=does("self.calls += 1", scale="1 / self.calls", init="self.calls = 0")),
    Case(
        "keeps a history",
        setup=does("self.past.append(1)", scale="len(self.past)", init="self.past = []"),
    ),
    Case(
        "counts calls in an object of its own",
        setup=does("self.seen.n += 1", init="self.seen = Seen()", before="class Seen:\n    n = 0"),
    ),
    Case(
        "counts calls in a global",
        setup=does("SEEN.append(1)", scale="len(SEEN)", before="SEEN = []"),
    ),
    Case(
        "counts calls in its class", setup=does("Net.calls = getattr(Net, 'calls', 0) + 1", scale="Net.calls")
    ),
    Case(
        "counts calls in a closure",
        setup=does(
            scale="count()",
            before="def counting():\n    seen = []\n    return lambda: seen.append(1) or len(seen)\n"
            "count = counting()",
        ),
    ),
    Case(
        "takes turns",
        setup=does("self.odd = not self.odd", scale="2.0 if self.odd else 1.0", init="self.odd = False"),
    ),
    Case(
        "reads an iterator",
        setup=does(scale="next(self.scales)", init="self.scales = iter([1.0] * 1000)"),
    ),
    Case(
        "reads a generator",
        setup=does(scale="next(self.scales)", init="self.scales = (1.0 for _ in range(1000))"),
    ),
    Case(
        "counts calls in a context variable",
        setup=does(
            "N.set(N.get() + 1)",
            scale="N.get()",
            before="import contextvars\nN = contextvars.ContextVar('n', default=0)",
        ),
    ),
    Case(
        "counts calls in the environment",
        setup=does(
            "os.environ['N'] = os.environ.get('N', '') + '1'",
            scale="len(os.environ['N'])",
            before="import os",
        ),
    ),
    Case("holds a lock", setup=does(init="self.lock = threading.Lock()", before="import threading")),
    Case(
        "reads a value left by the previous call",
        setup=does(
            "last, self.last = self.last, self.fc(x).detach()",
            scale="1 + last.mean()",
            init="self.last = torch.zeros(4, 4)",
        ),
    ),
    Case(
        "rebinds a buffer",
        setup=does(
            "self.level = self.level + 1",
            scale="self.level.mean()",
            init="self.register_buffer('level', torch.zeros(4))",
        ),
    ),
    Case(
        "writes a parameter",
        setup=does("with torch.no_grad(): self.fc.weight.clamp_(-0.1, 0.1)"),
    ),
    Case("writes a parameter through `.data`", setup=does("self.fc.weight.data.clamp_(-0.1, 0.1)")),
    Case("uses a parameter's gradient", setup=does("self.zero_grad()")),
    Case("sets `requires_grad`", setup=does("self.fc.bias.requires_grad_(False)")),
    Case("switches a mode", setup=does("self.d.train(not self.d.training)", init="self.d = nn.Dropout()")),
    Case("changes a layer's settings", setup=does("self.d.p += 0.01", init="self.d = nn.Dropout(0.1)")),
)

WORLD = (
    Case(
        "uses Python's random generator",
        setup=does(scale="1 + random.random()", before="import random"),
    ),
    Case("uses numpy's random generator", setup=does(scale="float(np.random.rand())")),
    Case(
        "uses its own numpy generator",
        setup=does(scale="self.rng.random()", init="self.rng = np.random.default_rng(1)"),
    ),
    Case(
        "uses its own torch generator",
        setup=does(scale="torch.rand((), generator=G)", before="G = torch.Generator().manual_seed(1)"),
    ),
    Case(
        "uses the system's randomness",
        setup=does(scale="1 + secrets.randbelow(2)", before="import secrets"),
    ),
    Case("sets torch's seed", setup=does("torch.manual_seed(1)", scale="torch.rand(())")),
    Case(
        "sets the state of torch's generator",
        setup=does(
            "torch.set_rng_state(STATE)", scale="torch.rand(())", before="STATE = torch.get_rng_state()"
        ),
    ),
    Case("reads the clock", setup=does(scale="1 + time.time() % 1", before="import time")),
    Case("opens a file", setup=does(scale="len(open(__file__).read())")),
)

BACKWARD = (
    Case(
        "uses a custom `autograd.Function`",
        setup=does(
            scale="Same.apply(x).mean()",
            before="class Same(torch.autograd.Function):\n"
            "    @staticmethod\n    def forward(ctx, x):\n        return x * 1\n"
            "    @staticmethod\n    def backward(ctx, g):\n        return g.clamp(-1, 1)",
        ).replace("Same.apply(x)", "Same.apply(self.fc(x))"),
    ),
    Case(
        "has a hook on a tensor",
        setup=does("h = self.fc(x); h.register_hook(lambda g: g * 0.5)", scale="h.mean()"),
    ),
    Case(
        "has a hook on a parameter",
        setup=does(init="self.fc.weight.register_hook(lambda g: g * 0.5)"),
    ),
    Case(
        "has a backward hook",
        setup=does(init="self.fc.register_full_backward_hook(lambda m, i, o: None)"),
    ),
    Case(
        "has hooks on tensors saved by autograd",
        setup=does(
            "with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t): h = self.fc(x)",
            scale="h.mean()",
        ),
    ),
    Case(
        "uses `torch.func.grad`",
        setup=does(scale="torch.func.grad(lambda t: self.fc(t).sum())(x).mean()"),
    ),
    Case(
        "is checkpointed with `use_reentrant=True`",
        setup=does(
            "h = checkpoint(self.fc, x.requires_grad_(), use_reentrant=True)",
            scale="h.mean()",
            before="from torch.utils.checkpoint import checkpoint",
        ),
    ),
    Case("passes a tensor to numpy", setup=does(scale="float(self.fc(x).detach().numpy().max())")),
    Case(
        "passes a tensor to numpy's functions", setup=does(scale="float(np.sin(self.fc(x).detach()).max())")
    ),
    Case("prints a number", setup=does("print(f'{self.fc(x).mean():.3f}')")),
    Case(
        "branches by `torch.cond`",
        setup=does(scale="torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)).mean()"),
    ),
    Case("uses `torch.vmap`", setup=does(scale="torch.vmap(self.fc)(x).mean()")),
    Case(
        "uses `gaussian_nll_loss`",
        setup=model("return F.gaussian_nll_loss(self.fc(x), torch.ones(4, 4), torch.ones(4, 4))"),
    ),
    Case("copies a layer", setup=does(scale="copy.deepcopy(self.fc)(x).mean()", before="import copy")),
    Case(
        "uses `ctc_loss`",
        setup=does(
            "n = torch.ones_like(y)",
            scale="F.ctc_loss(self.fc(x)[None].log_softmax(-1), y[:, None], n, n)",
        ),
    ),
    Case(
        "has an embedding with `max_norm`",
        setup=does(scale="self.e(y).mean()", init="self.e = nn.Embedding(4, 8, max_norm=1.0)"),
    ),
    Case(
        "has a complex parameter",
        setup=does(
            scale="(self.w.abs()).mean()", init="self.w = nn.Parameter(torch.ones(4, dtype=torch.complex64))"
        ),
    ),
    Case(
        "has two parameters that share memory",
        setup=does(
            scale="(self.p + self.q).mean()",
            init="both = torch.ones(6); self.p, self.q = nn.Parameter(both[:4]), nn.Parameter(both[2:])",
        ),
    ),
    Case(
        "has a sparse buffer",
        setup=does(
            scale="torch.sparse.mm(self.graph, x).mean()",
            init="self.register_buffer('graph', torch.eye(4).to_sparse())",
        ),
    ),
    Case(
        "has a buffer with the name of an input",
        setup=does(scale="self.x.mean()", init="self.register_buffer('x', torch.ones(4))"),
    ),
    Case(
        "reads a view of a parameter that was made before the call",
        setup=does(scale="self.half.mean()", init="self.half = self.fc.weight[:2]"),
    ),
    Case(
        "has a `forward` that is a closure over itself",
        "module=closed()",
        does(
            before="def closed():\n    net = Net()\n"
            "    net.forward = lambda x, y: F.cross_entropy(net.fc(x), y)\n    return net",
        ),
    ),
    Case(
        "returns a weight below zero",
        setup=model("return {'loss': self.fc(x).sum(), 'weight': -torch.ones(())}"),
    ),
)

SECTIONS = {
    "Jobs": JOBS,
    "Example inputs": EXAMPLES,
    "Data": DATA,
    "Training": TRAINING,
    "Models": MODELS,
    "Models that carry state": STATE,
    "Models that ask the world outside": WORLD,
    "Models that reach beyond the graph": BACKWARD,
}


@contextmanager
def coordinator() -> Iterator[FakeOwnerServer]:
    """A coordinator with one idle worker."""
    worker = pb.WorkerStatus(worker="w-1", name="one", state="pool")
    with FakeOwnerServer(Script(status=pb.StatusReply(version="0", workers=[worker]))) as server:
        yield server


def answer(case: Case, server: FakeOwnerServer, folder: Path) -> Answer:
    """Run `atoll submit` on the case's job file, in this process."""
    file = folder / f"{abs(hash(case))}" / "job.py"  # Python remembers the lines of a file by its path
    file.parent.mkdir()
    text = TEMPLATE.format(setup=case.setup, change=case.change)
    if "def job" in case.setup:
        text = text[: text.index("\ndef job():\n    given")]
    file.write_text(text)
    said = io.StringIO()
    console = command_line.Lines(file=said, width=10_000, highlight=False, markup=False, emoji=False)
    with mock.patch.object(command_line, "err", console):
        code = command_line.run(app, ["submit", str(file), *case.options, *server.options])
    message = " ".join(said.getvalue().rpartition("error: ")[2].split())
    message = re.sub(rf"{re.escape(str(file))}(:\d+)?:? ?", "", message)
    message = message.split(" After that the captured graph")[0]  # figures, which differ from run to run
    return Answer(code, re.sub(r"job\.py:\d+", "job.py", message))


def page() -> str:
    """The page as the commands answer now."""
    parts = [HEAD]
    with coordinator() as server, tempfile.TemporaryDirectory() as folder:
        for title, cases in SECTIONS.items():
            parts.append(f"\n## {title}\n\n| wrong input | message | exit code |\n|---|---|---|")
            parts += [row(case, answer(case, server, Path(folder))) for case in cases]
    return "\n".join(parts) + "\n"


def row(case: Case, said: Answer) -> str:
    """One line of the page's tables."""
    return f"| {case.name} | `{said.message.replace('`', '').replace('|', chr(92) + '|')}` | {said.code} |"


HEAD = """# Wrong inputs

This page shows what `atoll submit` answers to a job file that it cannot use: the message, preceded by the
file and line if they are known, and the [exit code](cli.md#exit-codes). Nothing is uploaded. `--trace` shows
the whole traceback of an exception in the job file.

The tables are made by `python -m tests.people.wrong_inputs`; a test compares them with what the command
prints."""


def main(arguments: Sequence[str]) -> int:
    """Write the page."""
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
