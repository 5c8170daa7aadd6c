"""Collectives: the interface, its process group and single-process forms, and the messages ranks send over them."""
