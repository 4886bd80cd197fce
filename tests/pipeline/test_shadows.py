"""Another package under one of our names is found, wherever it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.shadows import OURS, find_shadows
from tests.pipeline.made_cli import ROOT


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site-packages in which a package called doppel has installed `pipeline`."""
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "__init__.py").write_text("")
    distribute(tmp_path, "doppel", "pipeline\n")
    return tmp_path


def distribute(site: Path, name: str, top_level: str | None, record: str = "") -> None:
    folder = site / f"{name}-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (folder / "RECORD").write_text(record)
    if top_level is not None:
        (folder / "top_level.txt").write_text(top_level)


def test_alone() -> None:
    assert find_shadows([str(ROOT)]) == ()
    assert OURS == ("routing", "stages", "pipeline", "paceline")


def test_before_ours(site: Path) -> None:
    (shadow,) = find_shadows([str(site), str(ROOT)])
    assert shadow.name == "pipeline" and shadow.wins
    assert str(site / "pipeline") in shadow.found and "in place of ours" in shadow.found
    assert shadow.advice == "uninstall doppel, or install Paceline in an environment of its own"


def test_behind_ours(site: Path) -> None:
    (shadow,) = find_shadows([str(ROOT), str(site)])
    assert not shadow.wins
    assert "is hidden by ours" in shadow.found


def test_where_ours_is_found_otherwise(site: Path) -> None:
    """An editable install of ours is asked only after the whole path."""
    (shadow,) = find_shadows([str(site)])
    assert shadow.wins


def test_in_the_same_folder(site: Path) -> None:
    """Installed over each other: the module is one, its files are a mixture."""
    (site / "pipeline" / "__init__.py").unlink()
    distribute(site, "other", None, "stages/__init__.py,,\nother.py,,\n")
    stages, pipeline = find_shadows([str(ROOT), str(site)])
    assert stages.found == "stages is also installed by other"
    assert pipeline.found == "pipeline is also installed by doppel"
    assert "then install Paceline again" in stages.advice and not stages.wins


def test_a_module_is_a_shadow_and_a_mere_folder_is_none(tmp_path: Path) -> None:
    (tmp_path / "stages").mkdir()
    (tmp_path / "routing.py").write_text("")
    (shadow,) = find_shadows([str(tmp_path), str(ROOT)])
    assert shadow.name == "routing"
    assert "uninstall the package that brings routing" in shadow.advice


def test_the_current_directory(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(site)
    assert [shadow.wins for shadow in find_shadows(["", str(ROOT)])] == [True]
    assert len(find_shadows(["", str(site), "", str(ROOT)])) == 1
