"""The memory of a rank's weights, and the swap of live and shadow."""
