"""Snapshots: a version's weights in files, from which ranks of any layout come back without their trainer.

`disk` is what lies on disk: its names and format, and how it is written, committed, opened, listed and pruned. `save`, `restore`, `verify`
and `export` are the calls for programs; `block_reads` reads. `source` and `reader` are the two halves of the transfer mode `ipc_snapshot`,
and `offer_record` is what they agree on.
"""
