"""Runs an agent of this folder, for one rollout or for many: `async def play(row, base_url, api_key) -> reward`.

    python run.py openai_agents                               the row on standard input, as Covey starts it
    python run.py openai_agents --serve http://127.0.0.1:8765  rollouts of RemoteAgents, many at once, without end

The second way imports the agent's libraries once instead of once a rollout. Nothing of Covey is imported.
"""

import argparse
import asyncio
import contextlib
import importlib
import json
import os
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor


def once(play):
    """Play the rollout that this process was started for, and leave its reward."""
    row = json.load(sys.stdin)
    reward = asyncio.run(play(row, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]))
    os.write(int(os.environ["COVEY_REWARD_FD"]), str(reward).encode())


async def serve(play, url, at_once, patience):
    """Play rollouts until there has been no trainer for `patience` seconds."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(2 * at_once))  # each waits for a session, or runs its agent
    heard = loop.time()

    async def post(path, **body):
        return await loop.run_in_executor(None, post_now, url + path, body)

    async def one_after_another():
        nonlocal heard
        while loop.time() < heard + patience:
            try:
                session = await post("/sessions")
            except urllib.error.HTTPError:  # no rollout waits
                heard = loop.time()
                continue
            except OSError:  # nobody listens: the trainer is not there yet, or no longer
                await asyncio.sleep(0.5)
                continue
            try:
                ended = {"reward": await play(session["row"], session["base_url"], session["api_key"])}
            except Exception as error:
                ended = {"error": f"{type(error).__name__}: {error}"}
            with contextlib.suppress(OSError):  # it was late
                await post(f"/sessions/{session['id']}/reward", **ended)
            heard = loop.time()

    await asyncio.gather(*(one_after_another() for _ in range(at_once)))


def post_now(url, body):
    headers = {"Authorization": f"Bearer {os.environ['COVEY_AGENTS_KEY']}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as response:
        return json.load(response)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("agent", help="module of this folder")
    parser.add_argument("--serve", metavar="URL", help="play rollouts of the RemoteAgents there")
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--patience", type=float, default=600, help="seconds without a trainer after which it ends")
    given = parser.parse_args()
    play = importlib.import_module(given.agent).play
    if given.serve:
        asyncio.run(serve(play, given.serve, given.at_once, given.patience))
    else:
        once(play)


if __name__ == "__main__":
    main()
