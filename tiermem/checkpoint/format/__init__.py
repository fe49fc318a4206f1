"""The format of a checkpoint, and where its files are. manifest.py specifies it.

kinds      how elements are stored        fields     strict JSON, values without pickle
manifest   the files of a durable step    finding    the durable steps of a folder, and how files name each other
"""
