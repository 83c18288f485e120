"""What the secure-aggregation benchmark counts, on a small net."""

from __future__ import annotations

from argparse import Namespace

from atoll.secure import Secure
from benchmarks.secure_aggregation import CLASSES, PIXELS, measured

HIDDEN = 8
PARAMETERS = PIXELS * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES


def test_bytes_are_those_of_the_words_and_the_exchange() -> None:
    args = Namespace(clients=3, hidden=HIDDEN, seed=0)
    plain, masked = measured(args, {}), measured(args, {"secure": Secure()})
    assert 4 * PARAMETERS < plain["up_bytes"] < 4 * PARAMETERS + 2_000
    assert plain["up_bytes"] < masked["up_bytes"] < plain["up_bytes"] + 4_000
    fewer = measured(args, {"secure": Secure(), "uplink": "random_k:10"})
    assert fewer["up_bytes"] < 0.3 * masked["up_bytes"]
    assert measured(args, {"secure": Secure()}, lost=1)["members"] == 2
