"""The strategy ``zero1``: an example of a backend that its author writes with the faces of core alone."""
