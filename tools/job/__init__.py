"""Jobs: what one process under a memory cap is to do.

Files in order: each imports only files before it.

    launcher   starts a process with a job; the channel on which it tells
    train_job  the config and the saved step that options select
"""
