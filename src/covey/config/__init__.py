"""Configuration: field groups, old names, batch algebra and the base class of `GRPOConfig` and `RLOOConfig`."""
