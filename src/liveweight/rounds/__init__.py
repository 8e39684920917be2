"""The protocol of a round: the coordinator at the publisher, the leader of each replica, and what they agree on."""
