"""A game of two players in an OpenEnv server: each says a text twice, and the longer one of all that is said wins."""

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

ROLES = ("first", "second")
MOVES = 4


class Say(Action):
    text: str


class Heard(Observation):
    """`player` is the one that moves next, "" at the end, where `points` has the result of each player."""

    player: str
    last: str
    points: dict[str, float] = Field(default_factory=dict)


class Duel(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        self.said = []

    def reset(self, seed=None, episode_id=None, **settings):
        self.said = []
        return self.heard()

    def step(self, action, timeout_s=None, **settings):
        self.said.append(action.text)
        return self.heard()

    def heard(self):
        last = self.said[-1] if self.said else "nothing"
        if len(self.said) < MOVES:
            return Heard(player=ROLES[len(self.said) % 2], last=last, done=False, reward=None)
        first, second = (sum(map(len, self.said[player::2])) for player in (0, 1))
        result = float((first > second) - (first < second))
        return Heard(player="", last=last, points={"first": result, "second": -result}, done=True, reward=None)

    @property
    def state(self):
        return State(episode_id="duel", step_count=len(self.said))


app = create_app(Duel, Say, Heard, env_name="duel", max_concurrent_envs=4)
