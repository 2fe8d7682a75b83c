"""Small training runs whose weights, logs and samples are compared between commits by `tools/compare_commits.py`."""
