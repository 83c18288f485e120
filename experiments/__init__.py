"""Commands for experiments, which no worker installs: a demo, data sets, populations, disturbed fleets."""
