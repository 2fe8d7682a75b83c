"""A taskset of verifiers with an environment that answers: two turns of the policy, of which the second is rewarded."""

import verifiers.v1 as vf

__all__ = ["TalkingEnv", "TalkingTaskset"]


class TalkingEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class TalkingEnv(vf.Env[TalkingEnvConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            if not segment.terminated:
                segment = await interaction.turn(f"You said {segment.last_reply}. Again.")
            said = segment.last_reply
        if said == "boom":
            raise OSError("no luck")
        interaction.trace.record_reward("second", float(len(said)), 0.5)


class TalkingTaskset(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        for number in range(3):
            yield vf.Task(vf.TaskData(prompt=f"Word {number}?", system_prompt="Talk."), self.config.task)
