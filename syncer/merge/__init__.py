"""The coordinator's mathematics: pure functions on flat f32 tensors, on the CPU or a GPU."""
