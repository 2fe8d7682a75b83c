"""Planted faults: runs that go wrong in a known way, and healthy ones, by which `covey doctor` is measured."""
