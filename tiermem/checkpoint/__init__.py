"""Checkpoint: durable steps of a sharded model, which are the store's own files, and complete copies of them.

manifest.py   the format, specified      kinds.py   how elements are stored     plain.py   values as JSON
cover.py      parts put together         fields.py  strict JSON                 crc.py     CRC-32C of texts
"""
