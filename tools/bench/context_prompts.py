"""Prompts of exact lengths that end in a question which the text before does not have.

The text is that of `prefill`'s prompts. Were it all, the answer would go on with the text, and
where that repeats it would be a copy of what stands before: drafts would hit whatever the rows that
they look at. So a prompt ends in one of the prompts as it is asked, which the text leaves out.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from stages.loading import OpenedModel
from tools.bench.prefill import prompt_tokens
from tools.bench.prompts import Prompt, TokenPrompt, cut_prompts
from tools.bench.results import Options
from tools.bench.sizing import asked_tokens


def choose_questions(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """`count` of them, spread evenly over those of more than low complexity, if there are any."""
    long = [prompt for prompt in prompts if prompt.complexity != "low"] or list(prompts)
    return [long[index * len(long) // count] for index in range(count)]


def context_prompts(
    opened: OpenedModel, options: Options, lengths: Sequence[int]
) -> tuple[list[TokenPrompt], int]:
    """`options.repeats` prompts of each length, a question each repeat; and how many tokens of text
    there are before it repeats.

    Where a question is longer than a prompt its end is all of it. Raises OptionError.
    """
    questions = choose_questions(options.prompts, options.repeats)
    others = tuple(one for one in options.prompts if one not in questions) or options.prompts
    before = msgspec.structs.replace(options, prompts=others)
    text = prompt_tokens(str(opened.directory), before)
    asked = asked_tokens(opened, questions)
    made = []
    for number, cut in enumerate(cut_prompts(text, lengths, options.repeats)):
        question = questions[number // len(lengths)]
        made.append(_ended(cut, asked[question.id], question.id))
    return made, len(text)


def _ended(cut: TokenPrompt, question: Sequence[int], name: str) -> TokenPrompt:
    length = len(cut.prompt)
    tokens = (*cut.prompt[: max(0, length - len(question))], *question)
    return TokenPrompt(f"{cut.id}, {name}", tokens[-length:])
