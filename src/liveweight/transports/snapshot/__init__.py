"""Snapshots: a version's weights in files, from which ranks of any layout come back without their trainer.

`names` and `format` are what lies on disk, `parts` how weights are cut into it; `writer` and `store` write, commit, list and prune;
`opened`, `foreign` and `reading` read. `transport_source` and `reader` are the two halves of the transfer mode `ipc_snapshot`.
"""
