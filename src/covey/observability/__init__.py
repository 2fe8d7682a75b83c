"""Reporting of a run: metrics, timings, completions, a live display, curves and a report.

Every module takes plain values and can be used without a trainer. A new metric needs no registration: add a `Stat` to
the `MetricLog`, and one line to `covey.observability.metric_docs` so that the report and the documentation can explain
it.
"""
