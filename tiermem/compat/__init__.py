"""Functions under the names of the reference system.

Files in order: each imports only files before it.

    estimate  memory needs of a model that does not exist yet
"""
