"""One-sided reads over NIXL, on one host or across hosts: `gdr` lands in the shadow itself, `rdma` in host memory first.

`library` is NIXL as we call it. `registration_process` holds the source's registrations, `registration_client` is the publisher's end of
it, and `source` is the publisher's half. `session` is what a rank has registered and can reach, `reading` its reads of one offer, and
`reader` the rank's half. `arena_location` is what the source's half sends to the rank's half.
"""
