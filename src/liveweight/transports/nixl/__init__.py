"""One-sided reads over NIXL, on one host or across hosts: `gdr` lands in the shadow itself, `rdma` in host memory first.

`library` is NIXL as we call it. `registration` is the process that holds the source's registrations, `keeping` the publisher's end of it,
`source` the half of the publisher. `session` is what a rank has registered and can reach, `reading` its reads of one offer, `reader` the
half of a rank. `places` is what the two halves say to each other.
"""
