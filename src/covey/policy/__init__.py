"""The policy as a model: loading it, scoring tokens with it, and the reference it is compared to."""
