"""Access: certificates, tokens and owners, checked before anything that a caller sends is taken in."""
