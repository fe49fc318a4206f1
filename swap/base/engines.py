"""The I/O engines by name. It imports nothing: the options of commands read it before torch is there."""

ENGINES = ("auto", "uring", "aio", "threads")
"""enum tm_engine of native/tiermem.h in small letters: "auto", then the others as it tries them."""
