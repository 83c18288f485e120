"""Promises about blobs stand until what they were given for has come, or nobody comes for it."""

from __future__ import annotations

from coordinator.storage.promises import Promises


def test_a_promise_stands_until_whoever_it_was_given_to_has_reported() -> None:
    promises = Promises()
    promises.told("w1", "a", 1.0)
    promises.told("w2", "a", 2.0)
    promises.reported("w1", ["a", "of which nobody asked"])
    promises.lapse(0.0)
    assert promises.stands("a"), "w2 counts on it"
    promises.reported("w2", ["a"])
    assert promises.stands("a"), "whoever deletes now may have looked for reports before"
    promises.lapse(0.0)
    assert not promises.stands("a")


def test_a_promise_of_which_nobody_makes_use_lapses_and_one_that_is_renewed_does_not() -> None:
    promises = Promises()
    for at_s, blob in ((1.0, "old"), (1.0, "asked again"), (5.0, "asked again")):
        promises.told("w1", blob, at_s)
    promises.reported("w1", ["asked again"])
    promises.told("w1", "asked again", 6.0)
    promises.lapse(2.0)
    assert (promises.stands("old"), promises.stands("asked again")) == (False, True)
