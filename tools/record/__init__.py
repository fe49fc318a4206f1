"""Records: what became of a run.

Files in order: each imports only files before it.

    run_record  the record of a run, as runs/<id>/run.json has it
    reports     its tables
    plots       its pictures
"""
