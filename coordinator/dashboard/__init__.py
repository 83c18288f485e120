"""Dashboard: a read-only web page over what the role ``watch`` may ask; uses coordinator.client."""
