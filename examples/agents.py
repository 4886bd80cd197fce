"""Several local agents on one model: their prompts and drafts ride in the same sweeps.

    python examples/agents.py

PACELINE_MODEL and PACELINE_MEMORY choose another model and budget.
"""

import asyncio

from paceline import Answer, Engine

TASKS = (
    "Name a color.",
    "What is 17 times 6?",
    "Say hello in French.",
)


async def main() -> list[Answer]:
    async with Engine.open(sessions=len(TASKS), context=256) as engine:

        async def agent(task: str) -> Answer:
            return await engine.generate(
                messages=[{"role": "user", "content": task}], max_tokens=24
            )

        answers = await asyncio.gather(*(agent(task) for task in TASKS))
    for task, answer in zip(TASKS, answers, strict=True):
        print(f"{task} -> {answer.text.strip()}")
    return answers


if __name__ == "__main__":
    asyncio.run(main())
