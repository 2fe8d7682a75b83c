"""Runs that go wrong as users' runs do, and healthy ones, which the checks of `covey doctor` were not written for."""
