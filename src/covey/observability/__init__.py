"""What a run shows of itself: metrics, timings, completions, a live display, curves and a report.

Every module stands alone and receives plain values, so each can be used without a trainer. Nothing here computes a loss
or reads a config. A new metric needs no registration: add a `Stat` to the `MetricLog`, and one line to
`covey.observability.metric_docs` so that the report and the documentation can explain it.
"""
