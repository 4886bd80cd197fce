"""The flags of the command line: what each takes, and what its help says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str | None,
    typer.Option(
        "-m",
        "--model",
        metavar="MODEL",
        help="A directory, a GGUF file or a Hugging Face id. [default: SmolLM2-135M]",
    ),
]
Memory = Annotated[
    str | None,
    typer.Option("--memory", metavar="SIZE", help="Budget of the device, as 200MiB or 1.5GB."),
]
HostMemory = Annotated[
    str | None,
    typer.Option("--host-memory", metavar="SIZE", help="Budget for staging beside an accelerator."),
]
Context = Annotated[
    int | None, typer.Option("-c", "--ctx-size", help="Tokens of context, the answer included.")
]
Sessions = Annotated[int | None, typer.Option("--sessions", help="Requests answered at once.")]
Device = Annotated[str | None, typer.Option("--device", help="auto, cpu or simulated.")]
Substitute = Annotated[
    str | None,
    typer.Option("--substitute", help="auto, int4, int8, nf4, int6, int3, int2, lookup or none."),
]
DraftAhead = Annotated[
    bool | None,
    typer.Option(
        "--draft-ahead/--no-draft-ahead",
        help="Draft on while a tree is being verified. [default: draft-ahead]",
    ),
]
Overlap = Annotated[
    bool | None,
    typer.Option(
        "--overlap/--no-overlap",
        help="Read, draft and compute at once; without, one after the other. [default: overlap]",
    ),
]
LinkGbps = Annotated[
    float | None, typer.Option("--link-gbps", help="Simulate a link of so many GB/s.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Prompt = Annotated[
    str, typer.Argument(metavar="PROMPT", help="What to answer; - reads standard input.")
]
MaxTokens = Annotated[
    int | None, typer.Option("-n", "--max-tokens", help="Longest answer, in tokens.")
]
Seed = Annotated[
    int | None, typer.Option("-s", "--seed", help="Makes a sampled answer repeatable.")
]
Temperature = Annotated[
    float | None, typer.Option("--temp", help="0 is greedy; above it, sampled.")
]
TopK = Annotated[
    int | None, typer.Option("--top-k", help="Sample from the K likeliest tokens; 0 is off.")
]
TopP = Annotated[
    float | None, typer.Option("--top-p", help="From the likeliest that make up this share.")
]
MinP = Annotated[
    float | None, typer.Option("--min-p", help="From those this likely beside the likeliest.")
]
TypicalP = Annotated[
    float | None, typer.Option("--typical-p", help="From the typical that make up this share.")
]
RepeatPenalty = Annotated[
    float | None,
    typer.Option("--repeat-penalty", help="Above 1: against tokens of prompt and answer."),
]
PresencePenalty = Annotated[
    float | None,
    typer.Option("--presence-penalty", help="Against tokens of the answer, -2 to 2."),
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option("--frequency-penalty", help="The same, each time they occur."),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        "--logit-bias",
        metavar="TOKEN=BIAS",
        help="Add BIAS, -100 to 100, to the score of token id TOKEN; may be repeated.",
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", help="End before this text; may be repeated."),
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        "--logprobs", help="With --json: log-probabilities, and those of the N likeliest."
    ),
]
Raw = Annotated[
    bool, typer.Option("--raw", help="Continue the prompt as it is, without a chat template.")
]
Trace = Annotated[
    Path | None, typer.Option("--trace", help="Write a Chrome/Perfetto trace to this file.")
]
