"""Dependence of a captured graph's values on the samples of a micro-batch. Pure; torch's op schemas only.

``value``: what is known of one value. ``shapes``, ``families``: what each op makes of it. ``walk``: a
whole program, with its writes in place.
"""
