"""How a checkpoint is written down, and where its files are. manifest.py specifies it.

crc        CRC-32C of texts     kinds      how elements are stored     fields   strict JSON
plain      values as JSON       manifest   the files                   cover    parts put together
finding    which steps a place holds                                   places   how one file names another
"""
