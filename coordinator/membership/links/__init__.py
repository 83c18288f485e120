"""Links between workers: measured, guessed, relayed, and which pairs are measured next. Pure."""
