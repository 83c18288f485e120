"""What holds for every test: a busy machine makes none of them fail."""

from hypothesis import HealthCheck, settings

# Examples are bounded in number; how long one takes says something of the machine only.
settings.register_profile("atoll", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("atoll")
