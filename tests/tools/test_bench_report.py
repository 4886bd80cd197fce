"""A report has the figures of its files, their pictures, and what was not measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

from tests.tools.made_results import MIB, absent, made_decode, made_link, made_results, shared
from tools.bench.cli import run
from tools.bench.document.benchmarks import WITHOUT_SECTION
from tools.bench.document.markdown import rows_of


def write(folder: Path, *results: dict[str, Any]) -> list[str]:
    """Each in a file of its own."""
    files = []
    for number, result in enumerate(results):
        file = folder / f"{number}-{result['what']}.json"
        file.write_text(json.dumps(result))
        files.append(str(file))
    return files


def reported(folder: Path, *results: dict[str, Any]) -> str:
    to = folder / "performance.md"
    assert run(["report", *write(folder, *results), "--to", str(to)]) == 0
    return to.read_text()


def test_a_report_has_everything_in_one_order(tmp_path: Path) -> None:
    text = reported(tmp_path, *reversed(made_results().values()))
    heads = [line for line in text.splitlines() if line.startswith("## ")]
    assert heads == [
        "## The machine",
        "## The link (`link`)",
        "## One session out of core (`decode`)",
        "## Overlap (`overlap`)",
        "## Budgets (`budgets`)",
        "## Links (`links`)",
        "## The first token (`prefill`)",
        "## Where everything fits (`resident`)",
        "## Draft trees (`tree`)",
        "## Long contexts (`context`)",
        "## Not measured",
    ]
    # The machine and the versions.
    assert "| `decode` | Linux x86_64 | 2 | 8.0 | cpu | 1.25 | 12.50 |" in text
    assert "| accelerate | not installed |" in text
    # Commands: as given, or what is known of them.
    assert "python -m tools.bench decode --memory 200MiB\n" in text
    assert f"link --memory {200 * MIB} --limit 2 --max-tokens 16 --repeats 3\n" in text
    # Figures with their spread.
    assert "| tokens a second | 6.00 (5.00 - 8.00) | 2.00 (1.50 - 2.50) |" in text
    assert "| all of it, ms | 500.0 (450.0 - 600.0) | 600.0 (550.0 - 700.0) |" in text
    assert "| the link's bytes, ms | 400.0 (350.0 - 500.0) | 400.0 (350.0 - 500.0) |" in text
    assert "| drafted ahead, share kept | 0.50 | - |" in text
    assert "- drafting ahead: 1.20 (1.10 - 1.30) times the tokens a second\n" in text
    assert "| sweeps, GB/s | 0.900 (0.800 - 1.000) |" in text
    assert "| 200 | substitutes<br>int4 | 6.00<br>(5.00-7.00) | 0.50<br>of 12.0 | 3.00 |" in text
    assert "| 0.5 | substitutes<br>int4 | 6.00<br>(5.00-7.00) | 4.00 | 2.00 | 3.00 | 1.10 |" in text
    assert "| 2048 | 2.50 (2.25 - 2.75) | 1 |" in text
    assert "| int4 | 0 | ours | 5.00 (8, 5.0) | 5.00 (8, 5.0) |" in text
    assert "| 2048 | own | 1.50 | 2.50 | 5.00 | 20.0 | 4096.0 | 9 | 1.5 |" in text
    # Notes, and what was skipped.
    assert "- a note\n" in text
    assert "- lossless: paceline's tokens are plain's, for every prompt\n" in text
    assert "- NOT lossless at 8 GB/s: other tokens than plain's for b\n" in text
    assert "- transformers skipped: accelerate is not installed\n" in text


def test_pictures_lie_beside_the_document(tmp_path: Path) -> None:
    text = reported(tmp_path, *made_results().values())
    for what in made_results():
        assert f"](performance/{what}.png)" in text
        assert (tmp_path / "performance" / f"{what}.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.rglob(".*"))


def test_the_same_files_give_the_same_document(tmp_path: Path) -> None:
    first = reported(tmp_path, made_link(), made_decode())
    pictures = {file.name: file.read_bytes() for file in (tmp_path / "performance").iterdir()}
    assert reported(tmp_path, made_link(), made_decode()) == first
    assert {f.name: f.read_bytes() for f in (tmp_path / "performance").iterdir()} == pictures


def test_two_results_of_one_benchmark_have_a_section_each(tmp_path: Path) -> None:
    other = made_decode() | {"model": "/models/other", "simulated_link_gbps": 0.5}
    del other["command"]
    text = reported(tmp_path, made_decode(), made_link(), other)
    assert "](performance/decode.png)" in text
    assert "](performance/decode-2.png)" in text
    assert text.index("Model tiny. decode") < text.index("Model other. decode")
    assert "| 1.25 (simulated) |" in text
    assert "--repeats 3 --link-gbps 0.5\n" in text


def test_what_was_not_measured_is_told(tmp_path: Path) -> None:
    budgets = made_results()["budgets"]
    closing = reported(tmp_path, made_decode(), budgets).split("## Not measured")[1]
    for what in ("link", "overlap", "links", "prefill", "resident", "tree", "context"):
        assert f"- `{what}`: no result was given." in closing
    for what in WITHOUT_SECTION:
        assert f"- `{what}`: there is no command for it yet." in closing
    assert "`decode`:" not in closing
    assert "- `decode`, arm transformers: accelerate is not installed\n" in closing
    assert f"- `budgets`, {900 * MIB}: only 800 MiB are free here\n" in closing
    assert "- Energy a token: no counters" in closing
    assert "- CUDA: nothing here was computed on a GPU." in closing
    powered = made_decode()
    powered["arms"]["paceline"]["energy_j_per_token"] = 3.0
    powered["machine"] = {**powered["machine"], "device": "cuda:0"}
    closing = reported(tmp_path, powered).split("## Not measured")[1]
    assert "Energy" not in closing
    assert "CUDA" not in closing


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "truncated"),
        (b"{", "truncated"),
        (b"\xff\xfe", "no result"),
        (b"[1, 2]", "array"),
        (b'{"what": "decode"}', "missing"),
        (json.dumps(shared("sessions", arms={})).encode(), "'sessions'"),
        (json.dumps(shared("decode", arms={})).encode(), "KeyError"),
        (json.dumps(shared("link", arms={"plain": absent("why")})).encode(), "KeyError"),
        (json.dumps(shared("budgets", arms={}, budgets=7, skipped_budgets={})).encode(), "int"),
        (None, "No such file"),
    ],
)
def test_what_is_no_result_is_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, said: str
) -> None:
    before = reported(tmp_path, made_link())
    file = tmp_path / "foreign.json"
    if content is not None:
        file.write_bytes(content)
    to = tmp_path / "performance.md"
    assert run(["report", *write(tmp_path, made_decode()), str(file), "--to", str(to)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert str(file) in line
    assert said in line
    assert to.read_text() == before
    assert [one.name for one in (tmp_path / "performance").iterdir()] == ["link.png"]


def test_a_document_that_cannot_be_written_is_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = write(tmp_path, made_link())
    assert run(["report", *files, "--to", str(tmp_path / "no" / "such.md")]) == 2
    assert "--to" in capsys.readouterr().err
    assert run(["report"]) == 2


def test_a_table_for_people_becomes_one_of_markdown() -> None:
    table = Table()
    table.add_column("what")
    table.add_column("how\nmuch", justify="right")
    table.add_row("  a|b", "1\n(0-2)")
    assert rows_of(table) == "| what | how<br>much |\n| --- | ---: |\n| a\\|b | 1<br>(0-2) |"
