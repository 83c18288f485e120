"""Commands about the coordinator: served, looked at, copied; its workers, owners, authority and relays."""
