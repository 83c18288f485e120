"""What this machine's owner allows: terms of an invitation, consent, the least of which data may leave."""
