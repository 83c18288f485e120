"""Every figure in the docs comes from a script here."""
