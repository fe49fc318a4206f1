"""Checkpoint: durable steps of a sharded model, which are the store's own files, and complete copies of them.

manifest.py   the format, specified      kinds.py   how elements are stored     plain.py   values as JSON
cover.py      parts put together         fields.py  strict JSON                 crc.py     CRC-32C of texts

source.py     one opened, read, verified finding.py which there are, where      streams.py a state's bytes in their pieces
damage.py     the error of what is not what was saved
"""
