"""The options that benchmarks have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str | None,
    typer.Option(
        "-m",
        "--model",
        help="A directory, a GGUF file or a Hugging Face id. [default: SmolLM2-135M]",
    ),
]
Memory = Annotated[str, typer.Option("--memory", help="Budget of the device, as 200MiB or 1.5GB.")]
Prompts = Annotated[
    Path, typer.Option("--prompts", help="JSON lines: id, category, complexity, prompt.")
]
Limit = Annotated[int, typer.Option("--limit", min=1, help="Prompts, spread evenly over the file.")]
MaxTokens = Annotated[int, typer.Option("-n", "--max-tokens", min=2, help="Longest answer.")]
Seed = Annotated[int, typer.Option("-s", "--seed", min=0, help="Of sampling; decoding is greedy.")]
Repeats = Annotated[int, typer.Option("--repeats", min=1, help="Times that each prompt is asked.")]
PerLength = Annotated[int, typer.Option("--repeats", min=1, help="Prompts of each length.")]
Nodes = Annotated[
    int, typer.Option("--nodes", min=1, max=1024, help="Most nodes that a tree is sent with.")
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", help="Write the result and its picture into this directory."),
]
LinkGbps = Annotated[
    float | None, typer.Option("--link-gbps", help="Simulate a link of so many GB/s.")
]
Substitute = Annotated[
    str,
    typer.Option("--substitute", help="auto, int4, int8, nf4, int6, int3, int2, lookup or none."),
]
Gguf = Annotated[
    Path | None,
    typer.Option(
        "--gguf", exists=True, dir_okay=False, help="The model in float16, for the arm llamacpp."
    ),
]
