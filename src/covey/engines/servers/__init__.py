"""Inference servers as engines: sampling, failover and weight transfer, the same for every backend."""
