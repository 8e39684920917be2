"""The nouns: dtypes, tensors, regions, layouts, manifests, versions, digests, deadlines. Pure: no I/O."""
