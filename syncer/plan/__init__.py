"""A fleet in virtual time: the real coordinator, learners and links made of numbers."""
