"""Claims of published methods as values: what was measured, on what, and the verdict that was fixed in advance.

A `Claim` (`claim.py`) names its hypotheses, arms, settings, statistic and preconditions; all of them are in
`table.py`. To add one, write a value there. Beds (`beds.py`) run arms, measures (`measures.py`) turn their records
into differences, and `statistic.py` turns these into intervals and verdicts. `python -m benchmarks.claims --help`
runs and shows them.
"""
