"""Step programs: tiles that are read, stepped and written one after the other.

Files in order: each imports only files before it.

    table      the rows of a step program: its tiles, described once
    run_read   a read of bytes that a step program changes
    program    read | check | step | sum | write, tile by tile
"""
