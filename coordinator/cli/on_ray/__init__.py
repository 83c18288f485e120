"""Workers on a Ray cluster: what each takes of its node, the actor that keeps it, and the commands."""
