"""Chat templates that keep the thinking of earlier turns, made from those that drop it once a user goes on."""

import re
from typing import Any

from covey.core.records import Message

SWITCHES = {"preserve_thinking": "true", "truncate_history_thinking": "false", "clear_thinking": "false"}
"""Variables of the templates of Qwen 3.6 and LFM 2.5, Nemotron 3, and GLM 4.7; values that keep all thinking."""
CONDITIONS = {
    r"loop\.index0 > ns\.last_(query|user)_index": "true",  # Qwen 3 and 3.5, GLM 4.5 and 4.6, MiniMax M2
    r"loop\.last or \(not loop\.last and reasoning_content\)": "true",  # Qwen 3: in what is called no thinking
    r"\{%-? *if '</think>' in content *-?%\}\s*\{%-? *set content = content\.split\('</think>'\)\[-1\] *-?%\}\s*"
    r"\{%-? *endif *-?%\}": "",  # DeepSeek R1 and its distillates
}
"""Parts of templates without such a variable, and what they become."""
_ASKED: Message = {"role": "user", "content": "covey asks"}
_THOUGHT = "covey thinks"
_TURNS: tuple[list[Message], ...] = (
    [_ASKED],
    [{"role": "system", "content": "covey rules"}, _ASKED],
    [_ASKED, {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\ncovey says"}],
)


def keep_thinking(tokenizer: Any) -> None:
    """Rewrite a tokenizer's chat template so that it keeps the thinking of all turns, in what is saved, too.

    The template is left alone if it has no part that is known to drop thinking. ValueError if the new one would show
    the model another first turn than the old one does.
    """
    old = tokenizer.chat_template
    before = [_rendered(tokenizer, turns) for turns in _TURNS]
    tokenizer.chat_template = (
        {name: rewritten(text) for name, text in old.items()} if isinstance(old, dict) else rewritten(old)
    )
    after = [_rendered(tokenizer, turns) for turns in _TURNS]
    drops_at_once = before[-1] is not None and _THOUGHT not in before[-1]  # as DeepSeek R1's does
    if after[:-1] != before[:-1] or (after[-1] != before[-1] and not drops_at_once):
        tokenizer.chat_template = old
        raise ValueError(
            "unstable_chat_template='rewrite' would change what this chat template writes for the first turn, so it is"
            " one that Covey cannot rewrite. Change `tokenizer.chat_template` yourself, or choose 'keep'."
        )


def rewritten(template: str) -> str:
    """Source of a chat template that keeps thinking: `SWITCHES` are set, or `CONDITIONS` replaced."""
    switches = [
        f"{{% set {name} = {value} %}}" for name, value in SWITCHES.items() if re.search(rf"\b{name}\b", template)
    ]
    if switches:
        beginning = "".join(switches)
        return template if template.startswith(beginning) else beginning + template
    for part, replacement in CONDITIONS.items():
        template = re.sub(part, replacement, template)
    return template


def _rendered(tokenizer: Any, turns: list[Message]) -> str | None:
    last = turns[-1]["role"] == "user"
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=last))
    except Exception:  # templates are programs of their authors: some take no system message
        return None
