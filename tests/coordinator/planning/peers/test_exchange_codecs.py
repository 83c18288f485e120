"""Codec of peers' rounds: the mildest that keeps a round within a share of its period's computing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from atoll.errors import UsageError
from atoll.exchange import wanted_exchange
from atoll.job import TrainingSpec
from coordinator.planning import TUNED
from coordinator.planning.peers.exchange_codecs import CODECS, MARGIN, fitting
from tests.coordinator.planning.peers.test_local_plans import ROOMY, TRAINING, planned

OPEN = replace(TRAINING, exchange="diloco:auto")


def coded(mbit: float, training: TrainingSpec = OPEN) -> str:
    of: dict[str, Any] = {"mbit": mbit, "ms": 10, **ROOMY}
    plan = planned(training=training, **of)
    assert plan.exchange is not None
    return plan.exchange.codec


def test_the_thinner_the_links_the_stronger_the_codec() -> None:
    found = [coded(mbit) for mbit in (1000.0, 100.0, 30.0, 10.0, 3.0, 1.0, 0.1)]
    assert set(found) == set(CODECS)
    assert found == sorted(found, key=CODECS.index)


def test_a_codec_that_the_job_names_stays() -> None:
    assert coded(0.1, replace(TRAINING, exchange="diloco")) == "none"
    assert coded(1000.0, replace(TRAINING, exchange="diloco:int4_block")) == "int4_block"


def test_rules_that_code_their_rounds_themselves_refuse_it() -> None:
    assert TrainingSpec(steps=1, n_micro=1, exchange="streaming_diloco:auto").codes_rounds
    assert not TrainingSpec(steps=1, n_micro=1, exchange="diloco").codes_rounds
    with pytest.raises(UsageError, match="sparseloco codes its rounds by itself"):
        wanted_exchange("sparseloco:auto", 50)


@pytest.mark.parametrize("present", CODECS)
def test_the_present_codec_stays_while_its_round_is_within_the_share_and_a_milder_one_is_not_well_within(
    present: str,
) -> None:
    computed_s = 10.0
    assert fitting(present, 1e-9, computed_s) == CODECS[0]
    assert fitting(present, 1e9, computed_s) == CODECS[-1]
    milder = CODECS[CODECS.index(present) - 1] if present != CODECS[0] else None
    if milder is None:
        assert fitting(present, TUNED.round_share * computed_s * 0.99, computed_s) == present
        assert fitting(present, TUNED.round_share * computed_s * 1.01, computed_s) == "int8_block"
        return
    # Seconds in the present codec that the milder one would make so many shares of the computing.
    within = {share: share * TUNED.round_share * computed_s for share in (MARGIN * 0.9, MARGIN * 1.1)}
    smaller = {"int8_block": 0.26, "int4_block": 0.52}[present]  # of the bytes of the milder one, about
    assert fitting(present, within[MARGIN * 0.9] * smaller, computed_s) == milder
    assert fitting(present, within[MARGIN * 1.1] * smaller, computed_s) == present
