"""Reporting of a run: metrics, timings, completions, a live display, curves and a report, from plain values."""
