"""Sensors: power supply, temperature, use and energy of this machine, as far as its system reports them."""
