"""The first minute: a job file of one's own (`new`), and a fleet on this machine to train it (`dev`)."""
