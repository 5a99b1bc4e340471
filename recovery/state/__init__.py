"""The training state of a rank as named tensors: model, optimizer, and what a user adds."""
