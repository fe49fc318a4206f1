"""Step programs: tiles that are read, stepped and written one after the other.

Files in order: each imports only files before it.

    tile_plan  a tile as a step program gets it
    run_read   a read of bytes that a step program changes
    program    read | check | step | sum | write, tile by tile
"""
