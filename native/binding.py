"""Writes the C source of the Python module `_tiermem_native` from the one header, at build time.

What lies between the lines BINDING BEGINS and BINDING ENDS of tiermem.h is handed to cffi as it
stands (cffi's parser takes plain declarations, structs, enums and comments). Compiled in API mode,
so the C compiler checks every declaration against the header; the GIL is released round every call.
Nothing is built at run time.

    python binding.py tiermem.h _tiermem_native.c
"""

import re
import sys
from pathlib import Path

import cffi

MODULE = "_tiermem_native"


def read_declarations(header: Path) -> str:
    """Returns the text between the BINDING lines of `header`; raises ValueError when they are
    missing."""
    found = re.search(
        r"/\* BINDING BEGINS \*/\n(.*)/\* BINDING ENDS \*/", header.read_text("utf-8"), re.DOTALL
    )
    if found is None:
        raise ValueError(f"{header}: no lines 'BINDING BEGINS' and 'BINDING ENDS'")
    return found.group(1)


def write_binding(header: Path, source: Path) -> None:
    """Generates the C source of the module into `source`."""
    builder = cffi.FFI()
    builder.cdef(read_declarations(header))
    builder.set_source(MODULE, '#include "tiermem.h"\n')
    builder.emit_c_code(str(source))


if __name__ == "__main__":
    write_binding(Path(sys.argv[1]), Path(sys.argv[2]))
