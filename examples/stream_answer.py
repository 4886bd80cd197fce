"""Stream one answer from a model in a fixed amount of memory.

    python examples/stream_answer.py "Why is the sky blue?"

PACELINE_MODEL and PACELINE_MEMORY choose another model and budget.
"""

import asyncio
import sys

from paceline import Engine


async def main(prompt: str) -> None:
    async with Engine.open() as engine:
        stream = engine.stream(messages=[{"role": "user", "content": prompt}], max_tokens=64)
        async for delta in stream:
            print(delta.text, end="", flush=True)
    answer = stream.answer()
    print(f"\n{answer.usage.completion_tokens} tokens, {answer.tokens_per_round} a round")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "Name three rivers in France."))
