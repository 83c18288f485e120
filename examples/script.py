"""Train the digits of `mlp_digits.py` from a script: `python -m examples.script`.

atoll serve                                     # in one terminal
atoll-worker join 127.0.0.1:7700 --token T      # in another, as `atoll serve` prints it
"""

from __future__ import annotations

import argparse

import atoll
from examples.mlp_digits import job


def main() -> None:
    """Train, show the curve's ends, and export."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="digits", help="folder for the weights")
    with atoll.connect() as fleet:
        print(fleet.status())
        run = fleet.train(job())
        run.progress()
        losses = run.metrics().to_pandas()["loss"]
        print(f"loss from {losses.iloc[0]:.3f} to {losses.iloc[-1]:.3f}")
        print(run.export(parser.parse_args().out).path)


if __name__ == "__main__":
    main()
