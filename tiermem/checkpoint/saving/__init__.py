"""Saving: durable steps of a sharded model in the store's own files, and complete copies of them.

pieces     elements of states, their file ranges, their checksums     capture    the elements that a rank saves
publish    manifest, pointer and `latest`; removal of old steps       commit     a durable step in the store's files
copies     complete copies, written while training goes on            saver      saves tags and steps
"""
