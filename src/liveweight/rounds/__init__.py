"""The protocol of a round: the coordinator at the publisher, the leader of each replica, and the states that both use."""
