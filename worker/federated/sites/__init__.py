"""A client as its site's gateway: it adds what the others keep for it."""
