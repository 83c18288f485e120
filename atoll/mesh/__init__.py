"""A stage on the processes of one member: which part of every tensor each has, and what they send each other.

``layout``: how a value lies on them. ``rules``: what each op makes of its arguments' layouts. ``share``: a
program as each process runs it, by the kind of its inside plan. ``volumes``: the bytes of that. All of these
are pure. ``calls``, ``ring`` and ``group`` run it with torch. Imports nothing of Atoll but atoll's own
modules.
"""
