"""Games of two variants of a study, and a player that repeats its moves from a record."""

from covey.core.records import Completion, FinishReason
from covey.observability.record_files import FOLDER, files, read_rows


async def duel(row, players):
    """Each speaks twice and hears the other's words; more digits win. A role that nobody is trained in is a seat."""
    engines = {role: players.get(role) or next(iter(players.values())).seat(role) for role in ("first", "second")}
    talks = {role: engine.begin(f"{role} of {row['prompt']}: ") for role, engine in engines.items()}
    said = {"first": "", "second": ""}
    for _ in range(2):
        for role, other in (("first", "second"), ("second", "first")):
            if talks[role].completion_ids and not talks[role].write(f"[{said[other]}]"):
                continue
            said[role] = (await talks[role].sample(max_tokens=4)).text
    points = sum(map(str.isdigit, said["first"])) - sum(map(str.isdigit, said["second"])) + len(said["first"]) / 8
    return {role: talks[role].done(points=points * (1 if role == "first" else -1)) for role in players}


def points(points, **columns):
    return points


class Recorded:
    """A seat that makes the moves of a record's rollouts, turn after turn."""

    def __init__(self, folder, end_of_turn):
        self.rows = {}
        self.end_of_turn = end_of_turn
        for batch, path in enumerate(files(folder / FOLDER)):
            self.rows |= {(batch, row["row"], row["sample"]): row for row in read_rows(path)}

    def chosen(self, key):
        """The player of one game; its policy's age is of no matter."""
        _, mode, batch, prompt, sample, *_ = key
        assert mode == "train"
        return _Moves(iter(turns(self.rows[batch, prompt, sample])), self.end_of_turn), 0


def turns(row):
    """Tokens of each turn of a rollout."""
    begin = 0
    for end in row["turn_ends"]:
        while not row["sampled"][begin]:
            begin += 1
        yield row["token_ids"][begin : end + 1]
        begin = end + 1


class _Moves:
    def __init__(self, moves, end_of_turn):
        self.moves, self.end_of_turn = moves, end_of_turn

    async def generate(self, request):
        ids = next(self.moves)
        finish = FinishReason.STOP if ids[-1] == self.end_of_turn else FinishReason.LENGTH
        return [Completion(ids, None, finish)]
