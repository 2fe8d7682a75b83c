"""A taskset of verifiers with three agents: one proposes, one or two solve, depending on the task, and one judges."""

import verifiers.v1 as vf

__all__ = ["TeamEnv", "TeamTaskset"]


class TeamEnvConfig(vf.EnvConfig):
    proposer: vf.AgentConfig = vf.AgentConfig()
    solver: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()


class TeamEnv(vf.Env[TeamEnvConfig]):
    async def setup(self, agents):
        agents.judge.trainable = False

    async def ask(self, agent, task, text):
        async with agent.interaction(vf.Task(vf.TaskData(prompt=text), task.config)) as interaction:
            segment = await interaction.turn()
        return interaction.trace, segment.last_reply

    async def run(self, task, agents):
        proposer, proposed = await self.ask(agents.proposer, task, task.data.prompt)
        solved = [await self.ask(agents.solver, task, f"Solve {proposed}.") for _ in range(int(task.data.prompt[-1]))]
        _, verdict = await self.ask(agents.judge, task, f"Judge {' and '.join(said for _, said in solved)}.")
        proposer.record_reward("kept", float(len(verdict)))
        for trace, said in solved:
            trace.record_reward("length", float(len(said)))


class TeamTaskset(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        for solvers in (2, 1):
            yield vf.Task(vf.TaskData(prompt=f"Propose for {solvers}"), self.config.task)
