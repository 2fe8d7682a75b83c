"""mini-swe-agent, whose only tool is a shell: it has to print the answer of its task as a submission."""

import asyncio
import os
import tempfile

from arithmetic import score
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

SYSTEM = """Solve the task with one shell command at a time, each in a block like this:

```mswea_bash_command
echo $((345 * 12))
```"""
TASK = "{{task}} Print COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT on a line, and the answer on the next."


async def play(row, base_url, api_key):
    options = {"api_base": base_url, "api_key": api_key, "max_tokens": 200, "num_retries": 0}
    model = LitellmTextbasedModel(model_name="openai/policy", model_kwargs=options, cost_tracking="ignore_errors")
    with tempfile.TemporaryDirectory() as folder:
        shell = LocalEnvironment(cwd=folder, timeout=10, env={"PATH": os.defpath})
        agent = DefaultAgent(model, shell, system_template=SYSTEM, instance_template=TASK, step_limit=3)
        ended = await asyncio.to_thread(agent.run, row["prompt"][-1]["content"])
    return score(ended.get("submission", ""), row)
