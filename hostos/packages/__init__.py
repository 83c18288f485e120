"""Packages that an app brings along: pinned, fetched as wheels, unpacked beside this installation."""
