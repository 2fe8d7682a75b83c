"""Tools that a policy calls: reading its calls, executing them, and writing the results back as tokens."""
