"""One replica's decisions. Pure: messages and time go in, actions come out."""
