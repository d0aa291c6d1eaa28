"""Settings of the adapter registry over HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from motet.command_line import byte_size

from contract.settings import flags
from contract.settings.flags import optional_path, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrySettings:
    """What an operator sets about uploads."""

    max_upload_bytes: int = setting(
        "longest upload of an adapter", 2 << 30, unit="bytes", parse=byte_size, lowest=1 << 10, metavar="SIZE"
    )
    max_uploads: int = setting(
        "uploads that a process receives at once; their files lie on its disk meanwhile", 4, unit="a count", lowest=1
    )
    upload_dir: Path | None = setting(
        "where files of uploads lie until Motet has them",
        None,
        shown_default="the system's folder for temporary files",
        parse=optional_path,
        metavar="DIR",
    )

    def __post_init__(self) -> None:
        if (mistake := flags.find_mistake(self)) is not None:
            raise ValueError(mistake)
        if self.upload_dir is not None and not self.upload_dir.is_dir():
            raise ValueError(f"--upload-dir: {self.upload_dir} is not a directory; make it, or name another one")
