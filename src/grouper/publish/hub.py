"""Pushing to the Hub: a folder on request, and the checkpoints of a run in progress.

The token comes from the environment or the Hub's login (`hf auth login`), is never written, and is
masked in messages. The Hub knows files by their content, so that an interrupted push uploads only
the missing files when it is repeated.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # of httpx, or what follows it
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
    RevisionNotFoundError,
)

from grouper.errors import ModelError, first_line, register_secret
from grouper.files import dumps, write_atomic
from grouper.models.folders import ADAPTER_FILE, BEST_FILE, EXPORT_FILE, STATE_FILE
from grouper.models.trained import model_in
from grouper.publish.export import export_model, recipe_record
from grouper.publish.portable import without_folders
from grouper.training.hooks import Hook
from grouper.training.run import Run
from grouper.training.saved_state import OPTIMIZER_FOLDER
from grouper.training.state import TrainState

log = logging.getLogger(__name__)

# Files that the Hub creates in a new repository.
_EMPTY = {".gitattributes", "README.md"}
# Seconds that the end of a run waits for a checkpoint's upload.
CLOSING_SECONDS = 600.0


def push(
    folder: Path,
    repo: str,
    *,
    private: bool = True,
    revision: str | None = None,
    tag: str | None = None,
) -> str:
    """Upload a model folder, and return the address of the commit.

    Args:
        folder: of an export or a checkpoint; files that only training needs are left out.
        repo: `owner/name`, or `name` of the token's owner; created if it does not exist.
        private: whether a new repository is visible to its owner alone.
        revision: a branch to push to, created if it does not exist; default: main.
        tag: a tag for this commit: the name of a checkpoint.

    Raises:
        ModelError: there is no token or no right, the Hub cannot be reached, or the repository
            holds something that Grouper did not push.
    """
    token = get_token()
    if token is None:
        raise ModelError(
            "there is no token for the Hub",
            where="push",
            fix="Run `hf auth login`, or set HF_TOKEN in the environment.",
        )
    register_secret(token, "${HF_TOKEN}")
    api = HfApi(token=token)
    try:
        repo = api.create_repo(repo, private=private, exist_ok=True).repo_id
        existing = set(api.list_repo_files(repo))
        if existing - _EMPTY and EXPORT_FILE not in existing:
            raise ModelError(
                f"{repo} exists, and holds something that Grouper did not push "
                f"({', '.join(sorted(existing - _EMPTY)[:3])})",
                where="push",
                fix="Choose another name.",
            )
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            revision=revision,
            commit_message=f"Checkpoint {tag}" if tag else "Upload by Grouper",
            ignore_patterns=[f"{OPTIMIZER_FOLDER}/*", STATE_FILE, BEST_FILE],
            # Files of an earlier push: other shards, or an adapter that is merged now.
            delete_patterns=["*.safetensors*", "*config.json"],
        )
        if tag is not None:
            with contextlib.suppress(RevisionNotFoundError):  # the Hub cannot move a tag
                api.delete_tag(repo, tag=tag)
            api.create_tag(repo, tag=tag, revision=commit.oid)
    except _REFUSALS as error:
        raise _refusal(error, repo) from error
    return str(commit.commit_url)


# Errors of refusals by the Hub, and of a Hub that cannot be reached; a broken upload is a
# RuntimeError.
_REFUSALS = (HFValidationError, HTTPError, OSError, OfflineModeIsEnabled, RuntimeError)
_FIXES = {
    401: "The token is not valid: run `hf auth login`, or set HF_TOKEN to a new one.",
    403: "The token has no right to write there: make one with write access, or choose a name of "
    "your own.",
}
_AGAIN = "push again: what has arrived is not sent twice."


def _refusal(error: Exception, repo: str) -> ModelError:
    """Return the error for the user of an exception of the Hub's library."""
    if isinstance(error, HFValidationError):
        return ModelError(
            f"{repo!r} is not a name that the Hub has ({first_line(error)})",
            where="push",
            fix="Write OWNER/NAME, of letters, digits, -, _ and dots.",
        )
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        return ModelError(
            f"the Hub refuses to let {repo} be pushed to (status {status})",
            where="push",
            fix=_FIXES.get(status, f"Wait a little, and {_AGAIN}"),
        )
    return ModelError(
        f"the Hub cannot be reached ({first_line(error)})",
        where="push",
        fix=f"Check the network, HF_ENDPOINT and HF_HUB_OFFLINE, and {_AGAIN}",
    )


def export_and_push(
    source: str,
    repo: str,
    *,
    adapter: bool = False,
    private: bool = True,
    revision: str | None = None,
    license_id: str | None = None,
) -> str:
    """Push a model: an exported folder as it is, any other one after exporting it.

    Raises:
        ModelError: as `export_model` and `push`.
    """
    folder = Path(source).expanduser()
    if (folder / EXPORT_FILE).is_file():
        if adapter or license_id is not None:
            raise ModelError(
                f"{source} has been exported already, and is pushed as it is",
                where="--adapter" if adapter else "--license",
                fix="Give the option to `grouper export`, or push the run.",
            )
        return push(folder, repo, private=private, revision=revision)
    with tempfile.TemporaryDirectory(prefix="grouper-push-") as parent:
        target = Path(parent) / "model"
        export_model(source, target, adapter=adapter, place=repo, license_id=license_id)
        return push(target, repo, private=private, revision=revision)


class PushCheckpoints(Hook):
    """Pushes every checkpoint as a revision during training; a failure is only reported.

    Args:
        repo: as in `push`.
    """

    def __init__(self, repo: str) -> None:
        self._repo = repo
        self._last: threading.Thread | None = None

    def checkpoint_saved(self, run: Run, state: TrainState, folder: Path) -> None:
        """Push a checkpoint in the background, unless the previous one is still being uploaded."""
        if run.processes.rank != 0:
            return
        tag = f"{state.phase}-{state.step:06d}"
        if self._last is not None and self._last.is_alive():
            log.warning("%s is not pushed: the one before is still being uploaded.", tag)
            return
        copy = Path(tempfile.mkdtemp(dir=run.path, prefix=".push-", suffix=".tmp"))
        with _reported(tag):
            # Hard links, because the checkpoint may be removed during the upload.
            shutil.copytree(folder, copy, copy_function=os.link, dirs_exist_ok=True)
            write_atomic(copy / EXPORT_FILE, dumps(recipe_record(run.recipe)).encode())
            _forget_folders(copy / ADAPTER_FILE)
            self._last = threading.Thread(target=self._push, args=(copy, tag), daemon=True)
            self._last.start()

    def _push(self, copy: Path, tag: str) -> None:
        """Push the copy of a checkpoint, and delete it."""
        with _reported(tag):
            push(copy, self._repo, tag=tag)
            log.info("Pushed %s to %s.", tag, self._repo)
        shutil.rmtree(copy, ignore_errors=True)

    def run_ends(self, run: Run) -> None:
        """Push the trained model with its card, after the last checkpoint."""
        if run.processes.rank != 0:
            return
        if self._last is not None:
            self._last.join(CLOSING_SECONDS)
        with _reported("The model", f"\nTry again: grouper push {run.path} {self._repo}"):
            model = model_in(str(run.path))
            address = export_and_push(model, self._repo)
            run.display.say(f"Pushed {model}: {address}")


def _forget_folders(settings: Path) -> None:
    """Replace paths in the configuration of an adapter, which is a link to that of a checkpoint."""
    if settings.is_file():
        content = json.loads(settings.read_text(encoding="utf-8"))
        settings.unlink()
        write_atomic(settings, dumps(without_folders(content)).encode())


@contextlib.contextmanager
def _reported(name: str, hint: str = "") -> Iterator[None]:
    """Log an exception of a `with` block as a warning: a failed push must not end a run."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - any failure of a push
        log.warning("%s was not pushed: %s%s", name, error, hint)
