"""`atoll codecs`: codecs for links, and their speed on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from atoll.compression import MAX_RATIO
from atoll.errors import UsageError
from compressors.catalogue import CODECS, FLOATS, Codec, Use, codec
from coordinator.cli.views.format import in_bits
from coordinator.planning.codecs.ratios import DEFAULT_RATIO
from hostos.command_line import AsJson, err, out, print_json

ELEMENTS = 1 << 20
MAX_ELEMENTS = 1 << 28
REPEATS = 2
_USES = {Use.ACTIVATION: "A", Use.GRADIENT: "G", Use.DELTA: "D", Use.MODEL: "M"}
_PROMISES = {"exact": "E", "unbiased": "U", "linear": "L", "stateful": "S", "shared_state": "B"}
LEGEND = """for  A activations, G gradients, D deltas of a model, M whole models
is   E exact, the same bits; U unbiased, right in the mean; L linear: packets
     add up, as secure aggregation needs; S a state from tensor to tensor;
     B the same state at both ends
pays below: on a slower link, packing, sending and unpacking one after another
     take less time than sending dense. GB of dense numbers, one thread."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Speed of a codec on this machine, one thread; rates count dense bytes."""

    codec: Codec
    asked: float | None  # the ratio asked for; None: the codec takes none
    encode_bytes_per_s: float
    decode_bytes_per_s: float
    bytes_per_element: float
    ratio: float  # dense bytes / bytes on the wire
    break_even_bps: float

    def as_json(self) -> dict[str, Any]:
        """Every field and fact, JSON-ready."""
        facts = asdict(self)
        del facts["codec"]
        known = ("name", "summary", "source", "rated", *_PROMISES)
        uses = [use.value for use in Use if use in self.codec.valid_for]
        return {name: getattr(self.codec, name) for name in known} | {"valid_for": uses} | facts


def register(app: typer.Typer) -> None:
    """Add this module's command to the `atoll` command."""
    app.command(epilog="Example: atoll codecs topk int8_block --ratio 100")(codecs)


def codecs(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CODEC]...", help="Names of codecs to list, with their sources; default: all."
        ),
    ] = None,
    ratio: Annotated[
        float,
        typer.Option(
            min=1.0,
            max=MAX_RATIO,
            help="Requested ratio, dense bytes / wire bytes, for codecs that take one.",
        ),
    ] = DEFAULT_RATIO,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    elements: Annotated[
        int, typer.Option(min=1024, max=MAX_ELEMENTS, help="Elements of the Gaussian sample.")
    ] = ELEMENTS,
    seed: Annotated[int, typer.Option(help="Seed of the sample.")] = 0,
    json: AsJson = False,
) -> None:
    """List the codecs for links: what each is valid for, its speed on this machine, and when it pays."""
    if dtype not in FLOATS:
        raise UsageError(f"dtype {dtype!r}; give one of {', '.join(sorted(FLOATS))}")
    chosen = [codec(name) for name in names] if names else list(CODECS.values())
    with _progress(len(chosen), quiet=json) as advance:
        measured = list(_measured(chosen, ratio, dtype, elements, seed, advance))
    if json:
        print_json([each.as_json() for each in measured])
        return
    out.print(_table(measured))
    for each in measured if names else ():
        out.print(f"{each.codec.name}: {each.codec.summary}; after {each.codec.source}")
    out.print(LEGEND, style="dim")


def _measured(
    chosen: Sequence[Codec],
    ratio: float,
    dtype: str,
    elements: int,
    seed: int,
    advance: Callable[[str], None],
) -> Iterator[Measured]:
    """Each codec timed on one thread."""
    import torch  # slow to import

    from compressors.speed import break_even_bps, measure_on, sample

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        tensor = sample(elements, seed, dtype)
        size = tensor.element_size()
        for facts in chosen:
            advance(facts.name)
            rate = measure_on(facts.name, tensor, ratio, seed, repeats=REPEATS)
            share = rate.bytes_per_element / size
            pays = break_even_bps(share, rate.encode_bytes_per_s, rate.decode_bytes_per_s)
            asked = ratio if facts.rated else None
            yield Measured(
                facts,
                asked,
                rate.encode_bytes_per_s,
                rate.decode_bytes_per_s,
                rate.bytes_per_element,
                1 / share,
                pays,
            )
    finally:
        torch.set_num_threads(threads)


def _table(measured: Sequence[Measured]) -> RenderableType:
    table = Table(box=None, pad_edge=False)
    for name in ("codec", "for", "is"):
        table.add_column(name, no_wrap=True)
    for name in ("pack GB/s", "unpack", "B/number", "ratio", "pays below"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in measured:
        facts = each.codec
        table.add_row(
            facts.name,
            "".join(letter if use in facts.valid_for else "-" for use, letter in _USES.items()),
            "".join(letter if getattr(facts, name) else "-" for name, letter in _PROMISES.items()),
            f"{each.encode_bytes_per_s / 1e9:.2f}",
            f"{each.decode_bytes_per_s / 1e9:.2f}",
            f"{each.bytes_per_element:.3g}",
            f"{each.ratio:.3g}x",
            in_bits(each.break_even_bps) if each.break_even_bps else "never",
        )
    return Group(table, "")


@contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A bar on the terminal's error stream, named after the codec in hand."""
    if quiet or not err.redraws:
        yield lambda name: None
        return
    columns = (TextColumn("measuring {task.description}"), BarColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda name: bar.update(task, description=name, advance=1)
