"""Callbacks for training loops that are not the user's own; each module needs the library it is named after."""
