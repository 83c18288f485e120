"""Ways to a peer: dialled, met, relayed or tunnelled."""
