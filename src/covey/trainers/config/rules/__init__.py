"""The rules of a config, by theme; `covey.trainers.checks` collects and runs them."""
