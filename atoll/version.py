"""The version of Atoll, in a module that imports nothing."""

__version__ = "0.7.0"
