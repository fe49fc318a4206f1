"""The files of a checkpoint. manifest.py specifies the format.

kinds      how elements are stored        fields     strict readers of JSON, values without pickle
manifest   the files of a durable step    finding    the durable steps of a folder, and how files name each other
"""
