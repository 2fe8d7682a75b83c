"""Inference servers as engines: what all of them have in common, whoever made them."""
