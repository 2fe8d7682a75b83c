"""The rules of a config, by theme; `covey.config.rules.registry` collects and runs them."""
