"""Saving: durable steps of a sharded model, which are the store's own files, and complete copies of them.

pieces     stretches of elements, their places in files, their checksums     capture    the stretches of a rank
publish    manifest, pointer and `latest`; removal of old steps             commit     where states rest
copies     complete copies elsewhere, while training goes on                 saver      tags and steps
"""
