"""One replica's decisions. Pure: told of messages and of time, the leader answers with actions."""
