"""Rules that exchange gradients, compared in one process: no worker runs them (docs/data-parallel.md).

Importing this package adds them to the rules by name. A new one: its file, an entry in ``catalogue.py``, a
row in docs/data-parallel.md; the conformance tests find it.
"""

from __future__ import annotations

from experiments.exchanges.catalogue import GRADIENT_RULES
from strategies.exchanges import EXCHANGES, make_rule

__all__ = ["EXCHANGES", "make_rule"]

EXCHANGES.update({facts.name: facts for facts in GRADIENT_RULES})
