"""Models by their Hugging Face id, through huggingface_hub: its cache, its offline switch."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any, Final

from routing.errors import DiskFullError, ModelNotFoundError
from stages.cache import free_bytes
from stages.progress import Progress

_WANTED: Final = ("*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
# Other formats and precisions lie in folders; Mistral's own single file repeats the shards.
_UNWANTED: Final = ("*/*", "consolidated*")


def fetch(name: str, progress: Progress, cache_dir: Path | None = None) -> Path:
    """The directory in huggingface_hub's cache that holds the model ``name`` ("owner/name").

    What is missing there is downloaded: weights in safetensors, config and tokenizer, nothing
    else. ``cache_dir`` is the cache, huggingface_hub's own choice if None. With HF_HUB_OFFLINE
    nothing is asked for. Raises ModelNotFoundError for everything that is in the way, with what
    to do; DiskFullError.
    """
    from huggingface_hub import constants, snapshot_download

    try:
        directory = Path(
            snapshot_download(
                name,
                cache_dir=cache_dir,
                allow_patterns=list(_WANTED),
                ignore_patterns=list(_UNWANTED),
                tqdm_class=_reporter(f"fetching {name}", progress),
            )
        )
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            place = cache_dir or Path(constants.HF_HUB_CACHE)
            raise DiskFullError(str(place), 0, free_bytes(place)) from error
        raise ModelNotFoundError(name, _hint(error)) from error
    except Exception as error:  # the errors of two HTTP libraries, by version
        raise ModelNotFoundError(name, _hint(error)) from error
    if next(directory.glob("*.safetensors"), None) is None:
        raise ModelNotFoundError(
            name,
            "Its repository has no weights in the safetensors format. "
            "A GGUF file of the model can be given by its path.",
        )
    return directory


def _hint(error: Exception) -> str:
    """What to do about ``error``, in one line."""
    from huggingface_hub import errors

    if isinstance(error, errors.HFValidationError):
        return (
            "It is neither a directory, nor a GGUF file, nor a Hugging Face id as in 'owner/name'."
        )
    if isinstance(error, errors.GatedRepoError):
        return (
            "Hugging Face asks you to accept its terms on the model's page, then `hf auth login`."
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return "There is no such directory or file here, and no such model on Hugging Face."
    if isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
        return (
            "There is no such directory or file here; it is not (or not wholly) in Hugging Face's "
            "cache, and Hugging Face could not be reached. Unset HF_HUB_OFFLINE, or check the "
            "connection."
        )
    problem = " ".join(str(error).split())[:200] or type(error).__name__
    return f"There is no such directory or file here, and Hugging Face did not answer ({problem})."


def _reporter(what: str, progress: Progress) -> type[Any]:
    """A class of progress bars that shows nothing and tells ``progress`` about the bytes."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    lock = threading.Lock()  # files are downloaded by several threads

    class Reporter(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # There are bars for files, for bytes received and for bytes written: the last counts.
            name = kwargs.pop("name", None) or ""
            self._counts = kwargs.get("unit") == "B" and not name.endswith(".transfer")
            kwargs["disable"] = True
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            with lock:
                self.n += n or 0
                if self._counts:
                    progress.step(what, int(self.n), max(int(self.total or 0), int(self.n)))

    return Reporter
