"""Builds the C++ of `kernels/` into a shared library without Python, for `ecrm.kernels.native`.

Everything else about the package is in pyproject.toml.
"""

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = [
    "kernels/native.cpp",
    *sorted(path.as_posix() for path in Path("kernels").glob("*/cpu.cpp")),
]
BUILT = Path("kernels/_native.so")
"""The library of an editable install. An sdist has no library, so a wheel of it is compiled."""
HEADERS = sorted(path.as_posix() for path in Path("kernels").rglob("*.h"))

# No -march: the library must run on machines other than the one that built it; kernels/each_set.h
# raises the instruction set function by function. -ffp-contract=off: a fused multiply-add only
# where the source says so.
COMPILE = [
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-g0",
    "-Wall",
    "-pthread",  # the carrier of kernels/links has a thread
]
# GCC 12 warns falsely: of AVX-512 intrinsics inside its own header (its bug 105593) and of vectors
# passed between functions that are all inlined.
COMPILE += ["-Wno-maybe-uninitialized", "-Wno-psabi"]


class BuildLibrary(build_ext):
    """Names the library `_native.so`, without the tag of one Python version."""

    def get_ext_filename(self, ext_name: str) -> str:
        return str(Path(*ext_name.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        """Takes the library beside the sources where no source is newer, else compiles."""
        sources = [Path(file) for file in (*ext.sources, *ext.depends, "setup.py")]
        if BUILT.exists() and BUILT.stat().st_mtime > max(file.stat().st_mtime for file in sources):
            library = Path(self.get_ext_fullpath(ext.name))
            library.parent.mkdir(parents=True, exist_ok=True)
            self.copy_file(str(BUILT), str(library))
        else:
            super().build_extension(ext)

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []


class WheelForAnyPython(bdist_wheel):
    """One wheel per platform: the library is loaded through ctypes, whatever the Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


if sys.platform != "linux":
    raise SystemExit(f"ecrm builds on Linux only (Open MPI with ULFM, g++), not on {sys.platform}")

setup(
    ext_modules=[
        Extension(
            "ecrm.kernels._native",
            sources=SOURCES,
            depends=HEADERS,
            include_dirs=["kernels"],
            extra_compile_args=COMPILE,
            language="c++",
        )
    ],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": WheelForAnyPython},
)
