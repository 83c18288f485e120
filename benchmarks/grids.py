"""Bytes inside a site in closed form: tensor parallel over a grid of processes beside what plans have.

    python -m benchmarks.grids --json

A layer of a transformer has 12 h^2 weights of h features in four products, and t = b s tokens a micro-batch.
Bytes that each of p processes sends for it, forward and backward, in units of h^2 numbers, with x = t / h:

- ``tensor``: four all-reduces of t h (Megatron-LM, Shoeybi 2019, section 3): 8 (p - 1) / p x
- ``shards``: 12 h^2 gathered twice and scattered once (ZeRO-3, Rajbhandari 2020): 36 (p - 1) / p
- ``summa``: Optimus (Xu 2021, table 1) on q x q processes. A product of [t, k] and [k, n] moves both by
  blocks, its backward twice: of the four together 7 t h + 12 h^2, and twice that. The paper's factor for a
  tree of broadcasts is log2(p) / (2 q); gathers in a ring take (q - 1) / q^2, which is counted here:
  (q - 1) / q^2 (21 x + 36). Table 1 also counts a forward that is computed again, as for ``tensor``.
- ``rows x tensor``: rows over p / c groups as in ``shards``, each divided among c processes as in ``tensor``:
  8 (c - 1) / p x + 36 (p / c - 1) / p, of the best c. No plan has it; it is what a grid has to beat.

The paper's grid also divides what a layer stores; so do ``sequence``, ``ring`` and rows. Seconds are those of
the bytes at the link's rate, in 16 bits a number.
"""

from __future__ import annotations

from math import isqrt
from typing import Any

from benchmarks.harness import conclude, execute, parser

SITES = (4, 8, 9, 16, 64)
RATIOS = (0.5, 1.0, 2.0, 4.5, 8.0, 16.0, 64.0)  # tokens of a micro-batch for each feature
LINKS = {"NVLink 300 GB/s": 3e11, "PCIe 12 GB/s": 1.2e10, "1 Gbit/s": 1.25e8}
WIDTHS = (1024, 4096)
NUMBER_BYTES = 2


def tensor(ratio: float, size: int) -> float:
    """Return what each process sends for a layer, in numbers for each of width^2; so do the others."""
    return 8 * (size - 1) / size * ratio


def shards(ratio: float, size: int) -> float:
    """The same where matrices are gathered, whatever the tokens."""
    return 36 * (size - 1) / size


def summa(ratio: float, size: int) -> float | None:
    """The same on a square grid; None where processes make none."""
    side = isqrt(size)
    return (side - 1) / size * (21 * ratio + 36) if side * side == size else None


def rows_by_tensor(ratio: float, size: int) -> float:
    """The same of the best grid of rows by columns, both longer than one."""
    columns = [c for c in range(2, size) if size % c == 0]
    return min(8 * (c - 1) / size * ratio + 36 * (size / c - 1) / size for c in columns)


def wins(size: int) -> tuple[float, float] | None:
    """Return the range of tokens for each feature in which a square grid sends less than both kinds that
    plans have; None where there is none."""
    side = isqrt(size)
    factor = (side - 1) / size
    low = 36 * factor / (8 * (size - 1) / size - 21 * factor)  # against tensor, which has the least below
    high = (36 * (size - 1) / size - 36 * factor) / (21 * factor)  # against shards, the least above
    return (low, high) if low < high else None


def main() -> int:
    """Print the tables and, with --json, their figures."""
    args = parser(__doc__).parse_args()
    found: dict[str, Any] = {"numbers": [], "wins": {}, "seconds": []}
    for size in SITES:
        for ratio in RATIOS:
            row = {
                "devices": size, "tokens_by_width": ratio, "tensor": tensor(ratio, size),
                "shards": shards(ratio, size), "summa": summa(ratio, size),
                "rows_by_tensor": rows_by_tensor(ratio, size),
            }  # fmt: skip
            found["numbers"].append(row)
            grid = "   no" if row["summa"] is None else f"{row['summa']:5.1f}"
            print(
                f"{size:2} devices, {ratio:4g} tokens a feature, in width^2: tensor {row['tensor']:5.1f}, "
                f"shards {row['shards']:4.1f}, square grid {grid}, rows x tensor {row['rows_by_tensor']:5.1f}"
            )
        if isqrt(size) ** 2 == size:
            found["wins"][str(size)] = wins(size)
    for size, won in found["wins"].items():
        found_range = "never" if won is None else f"from {won[0]:.2f} to {won[1]:.2f} tokens a feature"
        print(f"a square grid of {size} sends less than tensor and shards {found_range}")
    for name, rate in LINKS.items():
        for width in WIDTHS:
            numbers = {"tensor": tensor(2.0, 4), "shards": shards(2.0, 4), "summa": summa(2.0, 4) or 0.0}
            took = {kind: each * width**2 * NUMBER_BYTES / rate for kind, each in numbers.items()}
            found["seconds"].append({"link": name, "width": width, "devices": 4, **took})
            shown = ", ".join(f"{kind} {seconds * 1e3:.3g} ms" for kind, seconds in took.items())
            print(f"{name}, width {width}, 4 devices, {2 * width} tokens, a layer: {shown}")
    wrong = "a square grid of four wins" if found["wins"]["4"] else ""
    return conclude(found, args.json, wrong)


if __name__ == "__main__":
    execute(main)
