"""How long tests wait for what comes in milliseconds: no machine is too slow, but what hangs must end."""

HUNG_S = 120.0
