"""All C sources of `kernels` as one library for this CPU: `library`. Compiled once, then kept. No torch.

A library's name holds digests of the sources, the flags and the compiler's version, so that an outdated library is
never used. Without a compiler a library that was built ahead is used (`prebuild`). Without either, `library` returns
None and callers fall back to torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from kernels.native.compiler import (
    COMPILE_TIMEOUT_S,
    Compiler,
    CompilerFailed,
    compile_library,
    find_compiler,
    identity_of,
    missing_compiler,
)
from kernels.native.cpu import this_cpu
from kernels.native.folder import CacheFolder, DamagedFile, ForeignFile
from kernels.native.target import Target, target_of, targets_to_prebuild

logger = logging.getLogger(__name__)

# Sums keep the source's order and NaN stays NaN: of -ffast-math only fused multiply-adds are allowed.
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-pthread")
SOURCES = Path(__file__).parent.parent
PREBUILT = Path(__file__).parent / "prebuilt"  # where an image has its libraries, beside the code
# Libraries of other sources that stay: those used last. An older version of the code finds its own again.
KEPT_OTHERS = 8


@dataclass(frozen=True, slots=True)
class NativeSettings:
    """Settings of native code in this process."""

    is_off: bool = False  # no native code: everything runs in plain torch
    cache_folder: Path | None = None  # where libraries and measurements are kept; None: where the environment says


_settings = NativeSettings()


def settings() -> NativeSettings:
    """The settings in force."""
    return _settings


def configure(settings: NativeSettings) -> None:
    """Put settings in force. What is loaded already is looked for again."""
    global _settings
    _settings = settings
    library.cache_clear()
    _loaded.cache_clear()


def cache_folder() -> Path | None:
    """Where libraries and measurements are kept: MOTET_NATIVE_CACHE, else below the user's cache folder."""
    if _settings.cache_folder is not None:
        return _settings.cache_folder
    if os.environ.get("MOTET_NATIVE_CACHE"):
        return Path(os.environ["MOTET_NATIVE_CACHE"])
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if caches.is_absolute():
        return caches / "motet" / "native"
    try:
        return Path.home() / ".cache" / "motet" / "native"
    except RuntimeError:  # a user without a home
        return None


@cache
def library() -> ctypes.CDLL | None:
    """The compiled sources. None, logged once, if there is no library and none can be made."""
    loaded = _loaded()
    return None if loaded is None else loaded.library


def library_name() -> str:
    """The file name of what `library` gives, which changes with all that its speed depends on; "none" without one."""
    loaded = _loaded()
    return "none" if loaded is None else loaded.name


def prebuild(folder: Path) -> Iterator[Path]:
    """Compile for every kind of CPU that runs this machine's programs, into a folder; each file as it is there.

    Raises CompilerFailed or OSError.
    """
    compiler = find_compiler()
    if compiler is None:
        raise CompilerFailed(missing_compiler())
    for target in targets_to_prebuild(this_cpu()):
        with tempfile.TemporaryDirectory(prefix="motet-") as place:
            recipe = Recipe(SOURCES, target)
            made = compile_library(compiler, recipe.flags, recipe.c_files, Path(place))
            path = CacheFolder(folder).write(recipe.name(identity_of(compiler)), made.read_bytes())
        # An image is made by one user and used by another, whatever the umask.
        path.chmod(0o644)
        path.parent.chmod(path.parent.stat().st_mode | 0o555)
        yield path


def stored_libraries(folder: Path | None = None) -> list[str]:
    """File names of the libraries that a worker on this CPU would load, without a compiler too. Loads nothing.

    `folder` stands in for that of the settings.
    """
    start, place = Recipe(SOURCES, target_of(this_cpu())).start, folder or cache_folder()
    folders = [_if_trusted(CacheFolder(each)) for each in (place, PREBUILT) if each is not None and each.is_dir()]
    return [name for each in folders if each is not None for name in each.names(start, ".so")]


@dataclass(frozen=True)
class Recipe:
    """What a library is made of: the sources below a folder, and the target."""

    sources: Path
    target: Target

    @property
    def flags(self) -> Sequence[str]:
        return (*FLAGS, *self.target.flags)

    @cached_property
    def c_files(self) -> list[Path]:
        return sorted(self.sources.rglob("*.c"))

    @cached_property
    def digest(self) -> str:
        """The digest of every source's and header's path and text, and of the flags."""
        whole = hashlib.sha256("\0".join(self.flags).encode())
        for path in sorted([*self.c_files, *self.sources.rglob("*.h")]):
            whole.update(f"\0{path.relative_to(self.sources)}\0{path.stat().st_size}\0".encode())
            whole.update(path.read_bytes())
        return whole.hexdigest()[:24]

    @property
    def start(self) -> str:
        """How the names of its libraries begin, whatever compiler made them."""
        return f"kernels-{self.target.name}-{self.digest}-"

    def name(self, identity: str) -> str:
        """The file name of its library by a compiler."""
        return f"{self.start}{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A library in this process."""

    library: ctypes.CDLL
    name: str  # of its file


class Loader:
    """Finds a recipe's library or makes it."""

    def __init__(
        self,
        recipe: Recipe,
        compiler: Compiler | None,
        *,
        cache: CacheFolder | None,
        prebuilt: CacheFolder | None,
        open_library: Callable[[str], ctypes.CDLL] = ctypes.CDLL,
    ) -> None:
        """`cache` is written; `prebuilt` is only read, and its libraries serve whatever compiler made them."""
        self._recipe = recipe
        self._compiler = compiler
        self._cache = _if_trusted(cache)
        self._prebuilt = _if_trusted(prebuilt)
        self._open_library = open_library

    def load(self) -> Loaded | None:
        """The library; None, said in the log, if it cannot be had."""
        reason = missing_compiler()
        name = None
        if self._compiler is not None:
            try:
                name = self._recipe.name(identity_of(self._compiler))
            except (CompilerFailed, OSError) as error:
                reason = str(error)
        found = (self._stored(self._cache, name) if name else None) or self._any_of(self._prebuilt)
        if found is None and name is not None:
            try:
                return self._made(name)
            except (CompilerFailed, OSError) as error:
                reason = str(error)
        found = found or self._any_of(self._cache)
        if found is None:
            logger.warning("native code is off: CPU steps are several times slower reason=%s", reason)
        return found

    def _any_of(self, folder: CacheFolder | None) -> Loaded | None:
        names = folder.names(self._recipe.start, ".so") if folder else []
        return next((loaded for name in names if (loaded := self._stored(folder, name))), None)

    def _stored(self, folder: CacheFolder | None, name: str) -> Loaded | None:
        if folder is None:
            return None
        try:
            content = folder.read(name)
        except (DamagedFile, OSError) as error:
            logger.warning("native code is not taken from the cache reason=%s", error)
            return None
        if content is None:
            return None
        folder.mark_used(name)
        try:
            return Loaded(self._open_library(str(folder.path / name)), name)
        except OSError as error:  # such as a file system that is mounted noexec
            logger.info("native code is loaded from a copy name=%s reason=%s", name, error)
        try:
            with tempfile.TemporaryDirectory(prefix="motet-") as place:
                copy = Path(place) / name
                copy.write_bytes(content)
                return Loaded(self._open_library(str(copy)), name)
        except OSError as error:
            logger.warning("native code cannot be loaded name=%s reason=%s", name, error)
            return None

    def _made(self, name: str) -> Loaded:
        """Compile, alone of the processes that share the cache. Raises CompilerFailed or OSError."""
        with contextlib.ExitStack() as stack:
            is_kept = False
            if self._cache is not None:
                try:
                    stack.enter_context(self._cache.locked(COMPILE_TIMEOUT_S))
                    is_kept = True
                except OSError as error:
                    logger.warning("native code is compiled at each start: no cache reason=%s", error)
            if is_kept and (found := self._stored(self._cache, name)):
                return found  # another process made it meanwhile
            return self._compile(name, is_kept=is_kept)

    def _compile(self, name: str, *, is_kept: bool) -> Loaded:
        assert self._compiler is not None
        begun_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="motet-") as place:
            made = compile_library(self._compiler, self._recipe.flags, self._recipe.c_files, Path(place))
            target, took_s = self._recipe.target.name, time.monotonic() - begun_s
            logger.info("native code is compiled target=%s took_s=%.1f", target, took_s)
            if is_kept and self._keep(name, made.read_bytes()) and (found := self._stored(self._cache, name)):
                return found
            return Loaded(self._open_library(str(made)), name)

    def _keep(self, name: str, content: bytes) -> bool:
        assert self._cache is not None
        try:
            self._cache.write(name, content)
        except OSError as error:  # such as a full disk
            logger.warning("native code is compiled at each start: no cache reason=%s", error)
            return False
        others = [other for other in self._cache.names("kernels-", ".so") if f"-{self._recipe.digest}-" not in other]
        for other in others[KEPT_OTHERS:]:
            self._cache.remove(other)
        return True


@cache
def _loaded() -> Loaded | None:
    if _settings.is_off or sys.byteorder != "little":
        reason = "it was turned off" if _settings.is_off else "this CPU is big-endian"
        logger.info("native code is off reason=%s", reason)
        return None
    place = cache_folder()
    kept = None if place is None else CacheFolder(place)
    recipe = Recipe(SOURCES, target_of(this_cpu()))
    return Loader(recipe, find_compiler(), cache=kept, prebuilt=CacheFolder(PREBUILT)).load()


def _if_trusted(folder: CacheFolder | None) -> CacheFolder | None:
    try:
        if folder is not None:
            folder.check()
    except ForeignFile as error:
        logger.warning("native code is not taken from, and not kept in, a folder reason=%s", error)
        return None
    except OSError:  # it is not there yet, or cannot be made, which is seen then
        pass
    return folder
