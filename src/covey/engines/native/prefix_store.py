"""Prompts that stay computed while conversations go on from them.

The turns of a conversation are requests of their own, and so are those of its siblings: all begin with the tokens of
one prompt, with its tools and examples, and arrive whenever somebody has answered. What was computed for it is kept
here until the engine sleeps, so that a later turn computes only what was said since. Not here: which requests those
are (`SampleRequest.shared`), and how rows read their prompts (`forked_cache`).
"""

from torch import Tensor
from transformers import Cache, DynamicCache

from covey.engines.native.cache_common import keys_and_values

KEPT_TOKENS = 1 << 14
"""Most tokens that are kept, those of prompts not used for longest going first."""

Layers = list[tuple[Tensor, Tensor]]


class PrefixStore:
    """Keys and values by the tokens of a prompt.

    Args:
        most_tokens: that are kept of all prompts together.
    """

    def __init__(self, most_tokens: int = KEPT_TOKENS):
        self.most_tokens = most_tokens
        self._known: dict[tuple[int, ...], Layers] = {}  # the one used last is last

    def __contains__(self, prompt: tuple[int, ...]) -> bool:
        return prompt in self._known

    @property
    def tokens(self) -> int:
        """How many are kept."""
        return sum(map(len, self._known))

    def keep(self, prompt: tuple[int, ...], prefilled: Cache | None, place: int) -> None:
        """Copy what was computed for a prompt, or for one that begins with it.

        Args:
            prompt: its tokens.
            prefilled: computed prompts without their last tokens; None if nothing was left of them.
            place: of this one among them.
        """
        if prompt in self._known or prefilled is None or not 1 < len(prompt) <= self.most_tokens:
            return
        computed = slice(0, len(prompt) - 1)
        self._known[prompt] = [
            (k[place, :, computed].clone(), v[place, :, computed].clone()) for k, v in keys_and_values(prefilled)
        ]
        while self.tokens > self.most_tokens:
            del self._known[next(iter(self._known))]

    def prefilled(self, prompts: list[tuple[int, ...]]) -> Cache:
        """Kept prompts without their last tokens, right-padded, as if they had just been computed."""
        cache = DynamicCache()
        width = max(map(len, prompts)) - 1
        kept = [self._known.pop(prompt) for prompt in prompts]
        self._known.update(zip(prompts, kept, strict=True))
        for number, layer in enumerate(zip(*kept, strict=True)):
            keys, values = zip(*layer, strict=True)
            cache.update(_padded(keys, width), _padded(values, width), number)
        return cache

    def clear(self) -> None:
        """Forget everything: the policy changes, or the memory is needed."""
        self._known.clear()


def _padded(parts: tuple[Tensor, ...], width: int) -> Tensor:
    """Tensors [kv_heads, tokens, D] -> [prompts, kv_heads, width, D], zeros on the right."""
    first = parts[0]
    whole = first.new_zeros(len(parts), first.shape[0], width, first.shape[2])
    for place, part in enumerate(parts):
        whole[place, :, : part.shape[1]] = part
    return whole
