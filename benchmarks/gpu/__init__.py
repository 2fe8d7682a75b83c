"""The GPU kit: what a CUDA machine without a network shows about Covey, one part at a time."""
