"""From an object file to a shared library, with whatever linker the machine has."""

from __future__ import annotations

import logging
import shutil
import subprocess

from .scratch import temporary_folder

__all__ = ["link"]

logger = logging.getLogger(__name__)


def link(object_file: bytes) -> bytes | None:
    """Return the object linked into a shared library, or ``None`` on a machine without a usable linker.

    The symbols of the runtime library and of the FFI stay open. They are bound when the library is loaded, at once
    and not at the first call (``-z now``), so that a missing symbol is an error of the load.
    """
    with temporary_folder() as folder:
        made = folder / "kernel.o"
        made.write_bytes(object_file)
        library = made.with_suffix(".so")
        for command in _commands():
            try:
                done = subprocess.run(
                    [*command, str(made), "-o", str(library)], capture_output=True, text=True, timeout=60
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                logger.info("%s failed: %s", command[0], error)
                continue
            if done.returncode == 0:
                return library.read_bytes()
            logger.info("%s failed: %s", command[0], done.stderr.strip())
    return None


_LINKERS = ("ld", "ld.bfd", "ld.lld", "ld.gold", "ld.mold")
_DRIVERS = ("cc", "gcc", "clang")
_OPTIONS = ("-z,now", "-z,noexecstack", "-Bsymbolic", "--build-id=none")


def _commands() -> list[list[str]]:
    """Return the link commands that can be tried, best first."""
    plain = [part for option in _OPTIONS for part in option.split(",")]
    commands = [[path, "-shared", *plain] for name in _LINKERS if (path := shutil.which(name))]
    driven = [f"-Wl,{option}" for option in _OPTIONS]
    commands += [[path, "-shared", "-nostdlib", *driven] for name in _DRIVERS if (path := shutil.which(name))]
    return commands
