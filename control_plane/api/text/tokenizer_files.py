"""Reads the checkpoint's tokenizer, and has an old one converted once."""

from __future__ import annotations

import logging
import subprocess
from pathlib import Path

from tokenizers import Tokenizer

from contract.process_log import shown
from control_plane.child_process import module_command

logger = logging.getLogger(__name__)

CONVERT_TIMEOUT_S = 120.0


def load_tokenizer(model_dir: Path, cache_file: Path) -> tuple[Tokenizer | None, str]:
    """The checkpoint's tokenizer, or None and the reason for clients. Blocks; a conversion goes into `cache_file`."""
    file = find_tokenizer_file(model_dir, cache_file)
    if file is None:
        if not _convert(model_dir, cache_file):
            return None, "the checkpoint has no tokenizer.json and its tokenizer could not be converted"
        file = cache_file
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        logger.warning("tokenizer unreadable file=%s error=%s", file, error)
        return None, "the checkpoint's tokenizer.json cannot be read"
    # Truncation and padding settings saved by a training run must not touch prompts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, ""


def find_tokenizer_file(model_dir: Path, cache_file: Path) -> Path | None:
    """The checkpoint's tokenizer.json, or the one that was converted; None if there is neither."""
    return next((file for file in (model_dir / "tokenizer.json", cache_file) if file.is_file()), None)


def _convert(model_dir: Path, out: Path) -> bool:
    if not any((model_dir / name).exists() for name in ("tokenizer_config.json", "tokenizer.model", "vocab.json")):
        return False  # nothing to convert: spare the import of transformers
    out.parent.mkdir(parents=True, exist_ok=True)
    logger.info("converting tokenizer", extra=shown("converting the checkpoint's tokenizer; this happens once"))
    command, environment = module_command("control_plane.api.text.convert", str(model_dir), str(out))
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=CONVERT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        logger.warning("tokenizer conversion timed out timeout_s=%g", CONVERT_TIMEOUT_S)
        return False
    if done.returncode != 0:
        # The libraries' words fill several lines; the server says what it means for clients.
        logger.info("tokenizer conversion failed reason=%s", " ".join(done.stderr.split())[-500:])
        return False
    logger.info("tokenizer converted file=%s", out)
    return True
