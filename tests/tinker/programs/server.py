"""A server that is started again whenever it is killed: `server.py MODEL PORT CHECKPOINTS [durable]`.

Each server is a fork of this process, which has imported everything, so a start takes a moment. Ids of processes are
printed, a line for each start.
"""

import os
import sys
import threading
from importlib import import_module

import covey.tinker.build

import_module("transformers.models.llama.modeling_llama")

model, port, checkpoints, *durable = sys.argv[1:]
while True:
    if not (child := os.fork()):
        options = {"names": ["tiny"], "checkpoints": checkpoints, "port": int(port), "durable": 1 if durable else None}
        with covey.tinker.build.serve(model, **options):
            threading.Event().wait()
    print(child, flush=True)
    os.waitpid(child, 0)
