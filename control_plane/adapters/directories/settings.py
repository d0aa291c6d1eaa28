"""Settings of adapters in directories, from which flags follow. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from contract.ids import ADAPTER_ID_FORM, is_adapter_id
from contract.settings.flags import find_mistake, optional_path, setting
from control_plane.access.tenant_names import TENANT_FORM, is_tenant

_ADAPTER, _OWNER = "--adapter", "--adapter-owner"


def _named(text: str) -> tuple[str, Path]:
    name, sign, directory = text.partition("=")
    if not (name and sign and directory):
        raise ValueError(f"{_ADAPTER}: {text!r} is not NAME=DIR")
    return name, Path(directory)


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectorySettings:
    """Which adapters the server registers by itself, and whose they are."""

    adapters: tuple[tuple[str, Path], ...] = setting(
        "adapter that is registered before the server is ready; may be repeated",
        (),
        name=_ADAPTER,
        metavar="NAME=DIR",
        shown_default="none",
        parse=_named,
        is_repeatable=True,
    )
    adapter_dir: Path | None = setting(
        "directory that is watched: each folder in it is an adapter of that name",
        None,
        shown_default="none",
        metavar="DIR",
        parse=optional_path,
    )
    adapter_dir_interval_s: float = setting("time between two looks at --adapter-dir", 5.0, unit="seconds", lowest=0.1)
    adapter_owner: str | None = setting(
        "tenant that alone may use the adapters of --adapter and --adapter-dir", None, shown_default="none: all may"
    )

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if (mistake := find_mistake(self)) is not None:
            raise ValueError(mistake)
        names = [name for name, _ in self.adapters]
        for name, directory in self.adapters:
            if not is_adapter_id(name):
                raise ValueError(f"{_ADAPTER}: {name!r} is not a valid adapter id: {ADAPTER_ID_FORM}")
            if names.count(name) > 1:
                raise ValueError(f"{_ADAPTER}: name {name!r} is given twice")
            if not directory.is_dir():
                raise ValueError(f"{_ADAPTER}: {name}: {directory} is not a directory")
        if self.adapter_dir is not None and not self.adapter_dir.is_dir():
            raise ValueError(f"--adapter-dir: {self.adapter_dir} is not a directory")
        if self.adapter_owner is not None and not is_tenant(self.adapter_owner):
            raise ValueError(f"{_OWNER}: {self.adapter_owner!r} is not a valid tenant: {TENANT_FORM}")
