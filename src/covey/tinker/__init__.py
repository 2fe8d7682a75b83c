"""A server that programs written for the `tinker` client train and sample with, on this machine.

`covey.tinker.build.serve` starts one in Python, `covey tinker-serve` from the command line.
"""
