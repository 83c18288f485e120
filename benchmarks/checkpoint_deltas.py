"""Bytes that a checkpoint sends: whole, as a delta against the one before, and with moments in 8 bits.

The byte-level GPT of ``examples/gpt.py`` on the sources of Python's library, in float32 and with all weights
in bfloat16, stored every few steps: in full training early and late, fine-tuned at small rates, and with a
few of its tensors trained, as adapters are. A tensor that did not change has the same name as before, so
nothing of it is sent with or without deltas. For moments in 8 bits the loss is compared after 100 more steps.
A receiver that has the state of 1, 2, 4 or 8 checkpoints before fetches the newest over the store's chains.

  python -m benchmarks.checkpoint_deltas --json
"""

from __future__ import annotations

import copy
import hashlib
import statistics
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from atoll import ByteText
from benchmarks.harness import conclude, execute, machine, parser
from benchmarks.reconstruction import windows
from compressors.deltas import decode, encode, fitting, name_of
from compressors.moments import SIGNED, SQUARES, round_in_place
from compressors.moments import rounded as in_codes
from coordinator.storage.blob_store import BlobStore
from coordinator.storage.delta_chains import DeltaChains
from examples.gpt import GPT
from protos.blob_transfer import Change, Chunk, Patch
from worker.blobs import BlobCache, BlobFiles
from worker.cancel import Cancel

Files = Mapping[str, bytes]
BEHIND = (1, 2, 4, 8)  # checkpoints


@dataclass(frozen=True, slots=True)
class Setup:
    """Sizes of the model and of its training."""

    width: int = 128
    layers: int = 4
    heads: int = 4
    length: int = 64
    batch: int = 8
    late: int = 600  # steps of full training before the late checkpoints
    rate: float = 1.5e-3
    more: int = 100  # steps after which losses are compared
    held_out: int = 256  # windows


@dataclass(frozen=True, slots=True)
class Case:
    """A training between two checkpoints."""

    name: str
    rate: float
    begun: bool  # with the weights of full training
    adapters: bool = False


CASES = (
    Case("full training, early", 1.5e-3, begun=False),
    Case("full training, late", 1.5e-3, begun=True),
    Case("fine-tuning at 5e-5", 5e-5, begun=True),
    Case("fine-tuning at 1e-6", 1e-6, begun=True),
    Case("adapters at 1e-3", 1e-3, begun=True, adapters=True),
)


class Training:
    """A model with its AdamW and the windows that it sees."""

    def __init__(self, setup: Setup, model: GPT, text: np.ndarray, rate: float, seed: int) -> None:
        self.model, self._setup = model, setup
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, rate, betas=(0.9, 0.95), weight_decay=0.0)
        self._draw, self._text = np.random.default_rng(seed), text

    def run(self, steps: int) -> None:
        """Take so many steps."""
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.model(windows(self._text, self._setup.batch, self._setup.length, self._draw))
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()

    def files(self, *, rounded: bool) -> Files:
        """Return a checkpoint's blobs; ``rounded``: moments in 8 bits, which the training goes on with."""
        found: dict[str, bytes] = {}
        for name, parameter in self.model.named_parameters():
            parts: dict[str, Tensor] = {"value": parameter.detach().contiguous()}
            state = self.optimizer.state.get(parameter)
            if state:
                moments = {key: state[key] for key in (SIGNED, SQUARES)}
                if rounded:
                    round_in_place(moments)
                parts |= in_codes(moments) if rounded else moments
            found[name] = save(parts)
        return found


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes of a checkpoint behind another, and by how many each form is fewer."""

    case: str
    dtype: str
    moments: str
    steps: int
    checkpoint: int  # of all its blobs
    changed: int  # of the blobs that are not those of the one before: what is sent without deltas
    delta: int
    share: float  # of the words of weights that changed
    seconds: float  # to encode

    @property
    def times(self) -> float:
        """How many times fewer bytes than without deltas."""
        return self.changed / max(1, self.delta)


def sent(case: Case, dtype: str, moments: str, steps: int, before: Files, after: Files) -> Sent:
    """Return what ``after`` sends behind ``before``; every delta is decoded and compared."""
    changed = delta = words = moved = 0
    begun = time.perf_counter()
    pairs: list[tuple[np.ndarray, np.ndarray, bytes]] = []
    for name, new in after.items():
        if before[name] == new:
            continue
        one, other = np.frombuffer(before[name], np.uint8), np.frombuffer(new, np.uint8)
        assert fitting(one, other)
        coded = b"".join(encode(one, other, (name_of(one), name_of(other))))
        pairs.append((one, other, coded))
        changed += len(new)
        delta += min(len(coded), len(new))
    took = time.perf_counter() - begun
    for one, other, coded in pairs:
        assert b"".join(decode(one, np.frombuffer(coded, np.uint8))) == other.tobytes()
    for name, new in after.items():
        first, last = _values(before[name]), _values(new)
        words, moved = words + len(first), moved + int((first != last).sum())
    total = sum(map(len, after.values()))
    return Sent(case.name, dtype, moments, steps, total, changed, delta, moved / max(1, words), took)


def _values(file: bytes) -> np.ndarray:
    flat = load(file)["value"].flatten()
    return flat.view(torch.int16 if flat.element_size() == 2 else torch.int32).numpy()


@torch.no_grad()
def held_out_loss(setup: Setup, model: GPT, text: np.ndarray) -> float:
    """Return the mean loss of windows that are the same whatever the seed."""
    draw = np.random.default_rng(0)
    batches = range(setup.held_out // setup.batch)
    return statistics.fmean(float(model(windows(text, setup.batch, setup.length, draw))) for _ in batches)


def begun(setup: Setup, text: np.ndarray, seed: int) -> GPT:
    """Return the model after its full training."""
    torch.manual_seed(seed)
    found = Training(setup, GPT(setup.width, setup.layers, setup.heads, setup.length), text, setup.rate, seed)
    found.run(setup.late)
    return found.model


def prepared(
    setup: Setup, case: Case, dtype: torch.dtype, late: GPT, text: np.ndarray, seed: int
) -> Training:
    """Return a case's training, ten steps on so that it has moments."""
    torch.manual_seed(seed)
    model = copy.deepcopy(late) if case.begun else GPT(setup.width, setup.layers, setup.heads, setup.length)
    model = model.to(dtype)
    if case.adapters:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name or name.endswith("bias") or ".0.up" in name)
    made = Training(setup, model, text, case.rate, seed + 1)
    made.run(10)
    return made


def measured(
    setup: Setup, late: GPT, texts: Sequence[np.ndarray], apart: Sequence[int], seed: int
) -> Iterator[Sent]:
    """Yield every case's bytes, in both types, with and without moments in 8 bits."""
    for dtype in (torch.float32, torch.bfloat16):
        for case in CASES:
            for rounded in (False, True):
                for steps in apart:
                    training = prepared(setup, case, dtype, late, texts[0], seed)
                    before = training.files(rounded=rounded)
                    training.run(steps)
                    after = training.files(rounded=rounded)
                    word = str(dtype).removeprefix("torch.")
                    yield sent(case, word, "8 bits" if rounded else "exact", steps, before, after)


def losses(setup: Setup, late: GPT, texts: Sequence[np.ndarray], seed: int) -> tuple[float, float]:
    """Return held-out losses of the late training after 100 more steps, exact and rounded at a checkpoint."""
    found = []
    for rounded in (False, True):
        training = prepared(setup, CASES[1], torch.float32, late, texts[0], seed)
        training.files(rounded=rounded)
        training.run(setup.more)
        found.append(held_out_loss(setup, training.model, texts[1]))
    return found[0], found[1]


class _Wire:
    """The store's side of a fetch, in this process; counts what a receiver fetches."""

    def __init__(self, folder: Path) -> None:
        self.store, self.chains, self.bytes = BlobStore(folder), DeltaChains(), 0

    def take(self, before: Files, after: Files) -> None:
        """Store a checkpoint's files, and the deltas that lead to them."""
        for name, new in after.items():
            self.store.put(new)
            if name not in before or before[name] == new:
                continue
            one, other = (np.frombuffer(data, np.uint8) for data in (before[name], new))
            hashes = name_of(one), name_of(other)
            delta = b"".join(encode(one, other, hashes))
            change = Change(hashes[1], hashes[0], self.store.put(delta), len(delta))
            self.store.discard(self.chains.add(change, len(new)))

    def get(self, wanted: list[tuple[str, int]]) -> Iterator[Chunk]:
        for name, offset in wanted:
            size = self.store.size(name)
            for piece in self.store.chunks(name, offset):
                yield Chunk(name, size, offset, piece)
                offset, self.bytes = offset + len(piece), self.bytes + len(piece)

    def missing(self, hashes: list[str]) -> dict[str, int]:
        return {name: 0 for name in hashes if not self.store.has(name)}

    def put(self, chunks: Iterator[Chunk]) -> Collection[str]:
        return ()  # nothing is sent up here

    def patch(self, patches: list[Patch]) -> Collection[str]:
        return ()  # nothing is sent up here

    def changes(self, hashes: list[str]) -> list[Change]:
        return [change for name in hashes for change in self.chains.to(name)]


def fetched(states: Sequence[Files], behind: int, folder: Path) -> tuple[int, int]:
    """Return the bytes of the newest state that its receiver lacks, and those that it fetches, where it has
    the state of ``behind`` checkpoints before."""
    wire, cache = _Wire(folder / "store"), BlobCache(folder / "cache", 1 << 40)
    wire.take({}, states[0])
    for before, after in pairwise(states):
        wire.take(before, after)
    for data in states[-1 - behind].values():
        cache.write(Chunk(hashlib.sha256(data).hexdigest(), len(data), 0, data))
    wanted = {hashlib.sha256(data).hexdigest(): data for data in states[-1].values()}
    lacking = sum(len(data) for name, data in wanted.items() if cache.held(name) is not None)
    BlobFiles(wire, cache).fetch({name: len(data) for name, data in wanted.items()}, Cancel())
    assert all(cache.path(name).read_bytes() == data for name, data in wanted.items())
    return lacking, wire.bytes


def downward(setup: Setup, late: GPT, text: np.ndarray, apart: int, seed: int) -> list[list[Any]]:
    """Return rows of what receivers fetch: case, type, checkpoints behind, bytes lacking, bytes fetched."""
    rows: list[list[Any]] = []
    for dtype in (torch.float32, torch.bfloat16):
        for case in CASES[1:]:
            training = prepared(setup, case, dtype, late, text, seed)
            states = [training.files(rounded=False)]
            for _ in range(max(BEHIND)):
                training.run(apart)
                states.append(training.files(rounded=False))
            word = str(dtype).removeprefix("torch.")
            for behind in BEHIND:
                with tempfile.TemporaryDirectory() as folder:
                    lacking, came = fetched(states, behind, Path(folder))
                rows.append([case.name, word, behind, lacking, came])
                print(
                    f"{case.name:22s} {word:9s} {behind} checkpoints behind: {came:10,d} bytes fetched of "
                    f"{lacking:10,d} ({lacking / max(1, came):5.2f} times fewer)",
                    flush=True,
                )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    made = parser(__doc__ or "")
    made.add_argument("--apart", default="1,10", help="steps between two checkpoints")
    made.add_argument("--late", type=int, default=Setup().late, help="steps of full training before")
    made.add_argument("--seeds", type=int, default=3, help="of the losses")
    options = made.parse_args(argv)
    setup = Setup(late=options.late)
    trained, held = ByteText(length=setup.length).materialise(1)
    assert held is not None
    texts = trained.arrays["text"], held.arrays["text"]
    late = begun(setup, texts[0], options.seed)
    rows: list[Sent] = []
    for row in measured(setup, late, texts, [int(n) for n in options.apart.split(",")], options.seed):
        rows.append(row)
        print(
            f"{row.case:22s} {row.dtype:9s} moments {row.moments:7s} {row.steps:4d} steps: "
            f"{row.checkpoint:10,d} bytes, {row.changed:10,d} in changed blobs, {row.delta:10,d} as deltas "
            f"({row.times:5.2f} times fewer), {row.share:6.1%} of words, "
            f"{row.changed / max(row.seconds, 1e-9) / 1e6:.0f} MB/s",
            flush=True,
        )
    down = downward(setup, late, texts[0], min(int(n) for n in options.apart.split(",")), options.seed)
    pairs = [losses(setup, late, texts, options.seed + n) for n in range(options.seeds)]
    gaps = [abs(rounded / exact - 1) for exact, rounded in pairs]
    fewer = min(a.changed / b.delta for a, b in _both(rows))
    print(f"held-out loss after {setup.more} more steps: {pairs}, largest gap {max(gaps):.3%}")
    print(f"moments in 8 bits and deltas: at least {fewer:.2f} times fewer bytes than exact and whole")
    figures = {
        "machine": machine(),
        "seed": options.seed,
        "rows": [[r.case, r.dtype, r.moments, r.steps, r.checkpoint, r.changed, r.delta] for r in rows],
        "fetched": down,
        "least_fewer_rounded": fewer,
        "largest_gap": max(gaps),
    }
    return conclude(figures, options.json, "")


def _both(rows: Sequence[Sent]) -> list[tuple[Sent, Sent]]:
    """Return pairs of one training, exact and rounded, in float32."""
    by = {(r.case, r.dtype, r.steps, r.moments): r for r in rows}
    return [
        (row, by[case, dtype, steps, "8 bits"])
        for (case, dtype, steps, moments), row in by.items()
        if moments == "exact" and dtype == "float32"
    ]


if __name__ == "__main__":
    execute(main)
