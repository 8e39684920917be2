"""Where a version's tensors come from: modules, state dicts, iterators, DTensors."""
