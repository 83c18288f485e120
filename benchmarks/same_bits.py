"""Bit-equality with another commit: both train the same jobs from copies of the same state folders.

    python -m benchmarks.same_bits                     # against 9125213, in an environment of its own
    python -m benchmarks.same_bits --against HEAD~1 --environment .venv

Each tree is driven by its own commands alone, on one thread of this machine's CPU. The other commit lays
the state folders: a worker's id is part of its federated seeds, so both trees need the same ones. The
demo's model (``examples/gpt.py`` as the other commit has it) is trained under two cuts, without codec and
with Top-K; SCAFFOLD trains on digits that three workers registered. Compared are names, dtypes, shapes and
bytes of the tensors that `atoll export` writes. Equal bits are promised within one device class: the same
processor, the same torch, as many threads.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file
from sklearn.datasets import load_digits

from atoll.errors import UsageError
from benchmarks.harness import conclude, execute, machine, parser
from benchmarks.trees import THIS, Fleet, Tree, checkout, install, python_of

if TYPE_CHECKING:
    from collections.abc import Sequence

FIRST = "9125213"
STEPS = 6
WORKERS = ("worker0", "worker1", "worker2")
SAMPLES = (160, 120, 90)  # of each worker's own digits
TWO, THREE = "cut:49", "cut:27,66"  # ops of the GPT's graph at which stages begin
TOPK = "topk:8"
DATASET = "digits"
FEDERATED_JOB = Path(__file__).with_name("same_bits_job.py")

Hashes = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Case:
    """One job, as both trees submit it."""

    name: str
    job: Path
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Compared:
    """SHA-256 of each exported tensor, by name, from both trees."""

    case: str
    theirs: Hashes
    ours: Hashes
    different: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        names = sorted(self.theirs.keys() | self.ours.keys())
        found = tuple(name for name in names if self.theirs.get(name) != self.ours.get(name))
        object.__setattr__(self, "different", found)


def tensor_hashes(data: bytes) -> dict[str, str]:
    """SHA-256 over name, dtype, shape and bytes of each tensor of a safetensors file, by name."""
    size = int.from_bytes(data[:8], "little")
    tensors = data[8 + size :]
    found = {}
    for name, facts in json.loads(data[8 : 8 + size]).items():
        if name == "__metadata__":
            continue
        begin, end = facts["data_offsets"]
        head = json.dumps([name, facts["dtype"], facts["shape"]]).encode()
        found[name] = sha256(head + b"\n" + tensors[begin:end]).hexdigest()
    return found


def whole(hashes: Hashes) -> str:
    """One hash of all tensors."""
    return sha256("".join(f"{name} {hashes[name]}\n" for name in sorted(hashes)).encode()).hexdigest()


def cases(gpt: Path, federated: Path, seed: int) -> list[Case]:
    """The jobs that are compared."""
    seeded = ("--set", f"SEED={seed}")
    fixed = ("--schedule", "1f1b", "--steps", str(STEPS), *seeded)
    cut = [
        Case(
            f"GPT, {count} stages, {compress}",
            gpt,
            ("--partitioner", starts, "--compress", compress, *fixed),
        )
        for count, starts in (("two", TWO), ("three", THREE))
        for compress in ("off", TOPK)
    ]
    return [*cut, Case("SCAFFOLD on digits", federated, seeded)]


def write_digits(folder: Path, seed: int) -> list[Path]:
    """A file of digits for each worker, no image in two of them."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    paths = []
    for worker, begin, count in zip(WORKERS, np.cumsum((0, *SAMPLES)), SAMPLES, strict=False):
        own = order[begin : begin + count]
        arrays = {"image": (images[own] / 16.0).astype(np.float32), "label": labels[own].astype(np.int64)}
        paths.append(folder / f"{worker}.safetensors")
        save_file(arrays, paths[-1])
    return paths


def lay(tree: Tree, folder: Path, digits: Sequence[Path]) -> None:
    """State folders of a coordinator and of enrolled workers, each with its data set."""
    with Fleet(tree, folder) as fleet:
        fleet.serve()
        for worker, path in zip(WORKERS, digits, strict=True):
            fleet.register(worker, DATASET, path)
            fleet.join(worker)


def trained(tree: Tree, folder: Path, wanted: Sequence[Case]) -> list[dict[str, str]]:
    """The hashes of what each case exports, trained by ``tree`` on the state folders below ``folder``."""
    found = []
    with Fleet(tree, folder) as fleet:
        fleet.serve()
        for worker in WORKERS:  # one after the other: a given cut takes the workers as they joined
            fleet.accept_any(worker, DATASET)
            fleet.join(worker)
        for case in wanted:
            job = fleet.submit(case.job, *case.options)
            fleet.finish(job)
            found.append(tensor_hashes(fleet.export(job).read_bytes()))
            print(f"  {case.name}: {whole(found[-1])[:16]}", flush=True)
    return found


def compared(other: Tree, folder: Path, seed: int) -> list[Compared]:
    """Every case, trained by ``other`` and by this tree."""
    shutil.copy(FEDERATED_JOB, folder)  # its neighbours would be importable beside it
    wanted = cases(other.folder / "examples" / "gpt.py", folder / FEDERATED_JOB.name, seed)
    lay(other, folder / "theirs", write_digits(folder, seed))
    shutil.copytree(folder / "theirs", folder / "ours")
    print("the other commit", flush=True)
    theirs = trained(other, folder / "theirs", wanted)
    print("this one", flush=True)
    ours = trained(THIS, folder / "ours", wanted)
    return [Compared(case.name, a, b) for case, a, b in zip(wanted, theirs, ours, strict=True)]


def same_versions(other: Tree) -> dict[str, str]:
    """Versions that both trees run on; UsageError where they differ."""
    theirs, ours = other.versions(), THIS.versions()
    if theirs != ours:
        raise UsageError(f"the other environment has {theirs}, this one {ours}; bits are compared within one")
    return ours


def table(found: Sequence[Compared], against: str) -> str:
    """One line a case."""
    rows = [("case", "tensors", against, "this tree", "equal")]
    for each in found:
        equal = f"no: {len(each.different)} tensors" if each.different else "yes"
        rows.append((each.case, str(len(each.ours)), whole(each.theirs)[:16], whole(each.ours)[:16], equal))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    )


def main() -> int:
    """Train, compare, report; 1 where a bit differs."""
    options = parser(__doc__ or "")
    options.add_argument("--against", default=FIRST, metavar="COMMIT")
    options.add_argument(
        "--environment", type=Path, metavar="PATH", help="virtual environment of COMMIT (default: a new one)"
    )
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="atoll-bits-") as name:
        folder = Path(name)
        source = checkout(given.against, folder / "tree")
        python = python_of(given.environment) if given.environment else install(source, folder / "venv")
        other = Tree(source, python)
        versions = same_versions(other)
        found = compared(other, folder, given.seed)
    print(table(found, given.against), flush=True)
    figures: dict[str, Any] = {
        "against": given.against,
        "seed": given.seed,
        "versions": versions,
        "machine": machine(),
        "tensors": sum(len(each.ours) for each in found),
        "equal": sum(len(each.ours) - len(each.different) for each in found),
        "cases": {
            each.case: {
                "tensors": len(each.ours),
                "theirs": whole(each.theirs),
                "ours": whole(each.ours),
                "different": each.different,
            }
            for each in found
        },
    }
    wrong = ", ".join(each.case for each in found if each.different)
    return conclude(figures, given.json, f"other bits in {wrong}" if wrong else "")


if __name__ == "__main__":
    execute(main)
