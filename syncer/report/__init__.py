"""A run as one page: the tape's lines -> columns -> facts -> pictures -> HTML."""
