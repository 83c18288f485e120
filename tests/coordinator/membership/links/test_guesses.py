"""Estimates for pairs that were never measured follow from those that were."""

from __future__ import annotations

import numpy as np

from coordinator.membership.links.guesses import guesses
from coordinator.membership.links.table import LinkTable, measured_fleet
from coordinator.planning.costs.fleet import UNKNOWN, Device, LinkEstimate


def table(**rates: tuple[float, float]) -> LinkTable:
    """``a_b=(bit/s, seconds)`` from a to b."""
    found = LinkTable()
    for name, (bps, latency_s) in rates.items():
        source, _, target = name.partition("_")
        found.estimates[source, target] = LinkEstimate(bps, latency_s)
    return found


def test_a_pair_without_figures_is_as_fast_as_the_slower_of_its_ends_has_shown():
    known = table(a_x=(10e6, 0.02), x_a=(80e6, 0.02), b_x=(40e6, 0.06), x_b=(5e6, 0.06))
    bps, latency_s = guesses(["a", "b"], {}, known, UNKNOWN)
    assert bps[0, 1] == 5e6
    assert bps[1, 0] == 40e6
    assert latency_s[0, 1] == latency_s[1, 0] == 0.04


def test_between_sites_the_median_of_what_was_measured_there_counts():
    places = {"a1": "a", "a2": "a", "b1": "b", "b2": "b"}
    known = table(a1_b1=(8e6, 0.03), a2_b1=(10e6, 0.05), a1_a2=(1e9, 0.001), b1_a1=(7e6, 0.03))
    bps, latency_s = guesses(list(places), places, known, UNKNOWN)
    assert bps[1, 3] == bps[0, 3] == 9e6
    assert latency_s[1, 3] == 0.04
    assert bps[1, 0] == 1e9
    assert bps[3, 0] == 7e6


def test_who_has_shown_nothing_counts_as_its_site_does_and_without_that_as_unknown():
    places = {"a1": "a", "a2": "a"}
    known = table(a1_x=(3e6, 0.02), x_a1=(6e6, 0.02))
    bps, _ = guesses(["a1", "a2", "z"], places, known, UNKNOWN)
    assert bps[1, 2] == 3e6
    assert bps[2, 1] == 6e6
    nothing, _ = guesses(["y", "z"], {}, known, UNKNOWN)
    assert nothing[0, 1] == UNKNOWN.bandwidth_bps


def test_a_pair_that_was_given_up_says_nothing_about_others():
    known = table(a_x=(1e3, 15.0), a_y=(30e6, 0.02), x_b=(30e6, 0.02))
    bps, latency_s = guesses(["a", "b"], {}, known, UNKNOWN)
    assert bps[0, 1] == 30e6
    assert latency_s[0, 1] == 0.02


def test_what_was_measured_counts_more_than_any_guess():
    known = table(a_b=(11e6, 0.01))
    guessed = (np.full((2, 2), 77e6), np.full((2, 2), 0.5))
    fleet = measured_fleet([Device("a", 1), Device("b", 1)], known, guessed=guessed)
    assert fleet.bandwidth_bps[0, 1] == fleet.bandwidth_bps[1, 0] == 11e6
    assert fleet.latency_s[0, 1] == 0.01
    assert fleet.latency_s[0, 0] == 0.0
