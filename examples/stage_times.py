"""Where does the time go? Answer once, print each stage's share, write a timeline.

    python examples/stage_times.py timeline.json

Open the file in ui.perfetto.dev or chrome://tracing. PACELINE_MODEL and PACELINE_MEMORY choose
another model and budget.
"""

import asyncio
import sys
from pathlib import Path

from paceline import Engine
from pipeline.tracing import summarize, write_chrome_trace


async def main(timeline: Path) -> None:
    async with Engine.open() as engine:
        await engine.generate(
            messages=[{"role": "user", "content": "Count to ten."}], max_tokens=32
        )
        spans = engine.trace.spans()
    for stage, summary in summarize(spans).items():
        speed = "" if summary.gbps is None else f", {summary.gbps:.2f} GB/s"
        print(f"{stage}: busy {summary.busy_share:.0%}, p50 {summary.p50_s * 1e3:.1f} ms{speed}")
    write_chrome_trace(timeline, spans)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1] if len(sys.argv) > 1 else "timeline.json")))
