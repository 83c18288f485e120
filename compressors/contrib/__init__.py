"""Codecs that no policy chooses by itself: asked for by name, or by an exchange that is built on one.

A codec moves up to ``compressors/`` when ``auto`` or ``adatopk`` may choose it or a job file gets it
unasked. What it must keep is the same as above: an entry in ``compressors/catalogue.py``, the
conformance suite, a source. Nothing above imports from here but the catalogue, for its size formulas.
"""
