"""Starts SGLang's server with a key that no other user of the machine can read: `python -m` this, with its flags.

SGLang takes its key from the command line alone, and the command line of a process is public. Here it comes from the
environment, and is added to the arguments inside of the process.
"""

import os
import runpy
import sys

KEY = "SGLANG_API_KEY"
"""Environment variable with the key; the trainer reads it too."""

LOGPROBS = "SGLANG_RETURN_ORIGINAL_LOGPROB"
"""Environment variable that makes a server leave the temperature out of its log-probs."""

MODULE = "covey.rollout.engines.remote.sglang_start"

if __name__ == "__main__":
    key = os.environ.pop(KEY, None)
    if key:
        sys.argv += ["--api-key", key]
    os.environ.pop(LOGPROBS, None)
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
