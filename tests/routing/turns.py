"""Running an event loop turn by turn, so that tests choose where a cancellation falls."""

from __future__ import annotations

import asyncio


async def turns(count: int) -> None:
    """Let every ready task run `count` times."""
    for _ in range(count):
        await asyncio.sleep(0)


async def settle() -> None:
    """Run until every task of these small tests waits for something that has not happened."""
    await turns(30)
