"""Another plan for a running job: what there is to choose from, what it costs, what follows. Pure."""
